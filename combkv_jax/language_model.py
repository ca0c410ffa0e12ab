"""Text in, text out: a model with its tokenizer, what `combkv_jax.load` returns."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np

from combkv_jax import compress as compression
from combkv_jax import generate as generation
from combkv_jax.cache import History
from combkv_jax.chunking import chunk_tokens
from combkv_jax.config import CombConfig
from combkv_jax.errors import RequestError
from combkv_jax.generate import Generation, Sampling
from combkv_jax.model import CombLlama, build, declarations

Text = str | Sequence[int] | np.ndarray

# Tokens that end a turn or a text in the chat formats of Llama-architecture models.
_END_TOKENS = ("<|im_end|>", "<|eot_id|>", "<|eom_id|>", "<|end_of_text|>", "<|endoftext|>", "</s>")


def default_dtype() -> str:
    """bfloat16 on an accelerator; float32 on a CPU, which is slower at anything shorter."""
    return "float32" if jax.default_backend() == "cpu" else "bfloat16"


def load(
    source: str | Path,
    *,
    dtype: str | None = None,
    mesh: jax.sharding.Mesh | None = None,
    encoder: str | None = None,
    kept_layers: str | Sequence[int] | None = None,
) -> LanguageModel:
    """Reads a model: a native, Hugging Face or CombLlama folder, a .gguf file, a preset or hub id.

    A plain Llama gets an untrained history: encoder ("decoder" or "layers") and kept_layers
    ("measured", "every4" or layers) as in `convert_weights.py`. mesh: from `sharding.parse_mesh`;
    weights go where it says. Raises RequestError.
    """
    from combkv_jax import console, sharding, weights
    from combkv_jax.weights import tailored

    def shardings(config: CombConfig):
        placement = sharding.place(config.text, mesh)
        for line in placement.notes:
            console.note(line)
        return placement.parameters(declarations(config))

    config, arrays, tokenizer = weights.load(
        source,
        dtype or default_dtype(),
        encoder=encoder,
        kept_layers=kept_layers,
        shardings=shardings if mesh is not None else None,
        note=console.note,
    )
    return LanguageModel(build(config, arrays), tokenizer, tailored.beside(source))


class LanguageModel:
    """A CombLlama and its tokenizer (None: only token ids can go in, and none come out as text).
    classified: the file that says which layers the `tailor` cache codes, if there is one."""

    def __init__(self, model: CombLlama, tokenizer: Any = None, classified: Path | None = None):
        self.model, self.tokenizer, self.classified = model, tokenizer, classified

    @property
    def config(self) -> CombConfig:
        """The model's configuration."""
        return self.model.config

    def __call__(self, batch: Mapping[str, Any]) -> jax.Array:
        """Logits of a packed batch, float32 [total, V] (`CombLlama.__call__`)."""
        names = ("input_ids", "cu_seqlens_q")
        if np.size(batch.get("chunk_ids", ())):
            names += ("chunk_ids", "cu_seqlens_k", "cu_seqlens_chunk")
        missing = [name for name in names if name not in batch]
        if missing:
            raise RequestError(f"the packed batch lacks {', '.join(missing)}.")
        arrays = {name: self._whole_numbers(batch[name], name) for name in names}
        return _forward(self.model, arrays)

    def encode(self, chunk_ids: Any, cu_seqlens_chunk: Any) -> list[tuple[jax.Array, jax.Array]]:
        """(K, V) a cross layer, [total, KV heads, head_dim] (`CombLlama.encode`)."""
        arrays = {"chunk_ids": chunk_ids, "cu_seqlens_chunk": cu_seqlens_chunk}
        return _encode(self.model, *(self._whole_numbers(x, n) for n, x in arrays.items()))

    def _whole_numbers(self, values: Any, name: str) -> jax.Array | np.ndarray:
        """What a packed batch holds, as int32; ids are within the vocabulary."""
        if isinstance(values, jax.core.Tracer):
            return values
        array = np.asarray(values)
        if array.dtype.kind not in "iu":
            raise RequestError(f"{name} has type {array.dtype}; whole numbers are needed.")
        if name.endswith("_ids") and array.size:
            self._check_ids(array)
        return array.astype(np.int32)

    def _check_ids(self, ids: np.ndarray) -> None:
        vocabulary = self.config.text.vocab_size
        if not 0 <= ids.min() <= ids.max() < vocabulary:
            raise RequestError(
                f"a token id is {ids.max() if ids.min() >= 0 else ids.min()}; this model's lie in "
                f"0..{vocabulary - 1}."
            )

    def tokens(self, text: Text, *, special: bool = False) -> np.ndarray:
        """Token ids int32 [n] of a text. special: with what the tokenizer puts around a text of
        its own, such as a first token. Ids pass through; RequestError when the vocabulary has
        not got them, or the text is not Unicode."""
        if isinstance(text, str):
            try:
                text.encode()
            except UnicodeEncodeError:
                raise RequestError("the text holds half a character; UTF-8 is needed.") from None
            ids = self._tokenizer()(text, add_special_tokens=special, verbose=False)["input_ids"]
            text = np.asarray(ids, np.int64)
        ids = np.asarray(text)
        if ids.ndim != 1 or (ids.size and (ids.dtype.kind not in "iu")):
            raise RequestError(f"token ids have shape {ids.shape}; a flat list is needed.")
        if ids.size:
            self._check_ids(ids)
        return ids.astype(np.int32)

    def compress(
        self,
        text: Text,
        *,
        history: History | None = None,
        chunk_batch: int | None = None,
        bits: int = 16,
        progress: Callable[[int], None] | None = None,
    ) -> History:
        """The compressed history of a text (or token ids), for any number of questions.

        history: what it is appended to. chunk_batch, bits, progress: as in `compress.compress`.
        """
        tokens = self.tokens(text, special=history is None)
        chunks = chunk_tokens(tokens, self.config.chunk_size)
        return compression.compress(
            self.model,
            [chunks],
            history=history,
            chunk_batch=chunk_batch,
            bits=bits,
            progress=progress,
        )

    def chat_tokens(
        self, messages: Sequence[Mapping[str, str]], *, begins: bool = True
    ) -> np.ndarray:
        """The tokens of a conversation and the opening of the next reply, by the tokenizer's chat
        template; the bare texts in order when it has none. begins: whether it begins the text, so
        that a first token of the template stays."""
        if getattr(self._tokenizer(), "chat_template", None):
            text = self.render(messages, add_generation_prompt=True)
            tokens = self.tokens(text)
            return tokens if begins else self.without_bos(tokens)
        return self.tokens("\n".join(m["content"] for m in messages), special=begins)

    def render(
        self, messages: Sequence[Mapping[str, str]], *, add_generation_prompt: bool = False
    ) -> str:
        """The conversation as the tokenizer's chat template writes it."""
        import jinja2

        try:
            return self._tokenizer().apply_chat_template(
                list(messages), add_generation_prompt=add_generation_prompt, tokenize=False
            )
        except jinja2.TemplateError as error:
            raise RequestError(
                f"the tokenizer's chat template does not take these messages: {error}."
            ) from error

    def without_bos(self, tokens: np.ndarray) -> np.ndarray:
        """The tokens without a first one that only begins a text."""
        bos = getattr(self.tokenizer, "bos_token_id", None)
        # Where one token opens every turn it is part of the format and stays.
        opens_turns = np.count_nonzero(tokens == bos) > 1
        return tokens[1:] if len(tokens) and tokens[0] == bos and not opens_turns else tokens

    def stop_tokens(self) -> list[int]:
        """Tokens that end a reply."""
        tokenizer = self.tokenizer
        if tokenizer is None:
            return []
        vocabulary = tokenizer.get_vocab()
        known = {vocabulary[t] for t in _END_TOKENS if t in vocabulary}
        return sorted(known | ({tokenizer.eos_token_id} - {None}))

    def generate(
        self,
        prompt: Text,
        history: History | None = None,
        *,
        max_new_tokens: int = 256,
        sampling: Sampling | None = None,
        cache: str = "full",
        cache_options: dict[str, Any] | None = None,
    ) -> Iterator[str]:
        """Streams the continuation of a prompt, in pieces that never break a character.

        history: a compressed history in front of the prompt. cache: the policy for recent tokens.
        The end token is not part of the text. Raises RequestError.
        """
        run = self.start(
            [self.tokens(prompt, special=history is None)],
            history,
            max_new_tokens=max_new_tokens,
            sampling=sampling,
            cache=cache,
            cache_options=cache_options,
        )
        return self.stream(run)

    def start(
        self,
        prompts: Sequence[np.ndarray],
        history: History | None = None,
        *,
        max_new_tokens: int = 256,
        sampling: Sampling | None = None,
        cache: str = "full",
        cache_options: dict[str, Any] | None = None,
    ) -> Generation:
        """Prefills one prompt a row and draws the first token of each."""
        if max_new_tokens < 1:
            raise RequestError(f"max-new-tokens is {max_new_tokens}; at least 1 is needed.")
        capacity = max(map(len, prompts), default=0) + max_new_tokens
        if cache == "tailor":
            cache_options = self.tailored(max_new_tokens) | (cache_options or {})
        empty = generation.new_cache(
            self.model,
            capacity,
            history,
            batch=len(prompts),
            policy=cache,
            options=cache_options,
        )
        logits, filled = generation.prefill(self.model, empty, prompts)
        return Generation.start(
            self.model, filled, logits, sampling or Sampling(), self.stop_tokens(), max_new_tokens
        )

    def tailored(self, max_new_tokens: int) -> dict[str, Any]:
        """The options by which the `tailor` cache knows this model and a generation."""
        from combkv_jax.weights import tailored

        room = {"generated": max_new_tokens}
        if self.classified is None or not self.classified.exists():
            return room
        return room | {"quantized": tailored.read(self.classified, self.model).quantized}

    def stream(self, run: Generation) -> Iterator[str]:
        """The text of a generation of one row, as it comes."""
        pieces = TextStream(self._tokenizer())
        stops = set(self.stop_tokens())
        for tokens in run:
            if int(tokens[0]) in stops:
                break
            if piece := pieces.push(int(tokens[0])):
                yield piece
        if piece := pieces.finish():
            yield piece

    def text(self, tokens: Sequence[int]) -> str:
        """The text of tokens, without special ones."""
        return self._tokenizer().decode(list(tokens), skip_special_tokens=True)

    def _tokenizer(self) -> Any:
        if self.tokenizer is None:
            raise RequestError("this model came without a tokenizer; give token ids, not text.")
        return self.tokenizer


@jax.jit
def _forward(model: CombLlama, batch):
    return model(batch)


@jax.jit
def _encode(model: CombLlama, chunk_ids, cu_seqlens_chunk):
    return model.encode(chunk_ids, cu_seqlens_chunk)


class TextStream:
    """Tokens to text, piece by piece: a piece is held back while it ends inside a character."""

    HELD = 16  # tokens after which a piece that still ends badly is no character at all

    def __init__(self, tokenizer: Any):
        self.tokenizer = tokenizer
        self.tokens: list[int] = []
        self.shown = 0  # tokens whose text has been given out

    def push(self, token: int) -> str:
        """One more token: the text that is now certain, often none."""
        self.tokens.append(token)
        piece = self._pending()
        if piece.endswith("\ufffd") and len(self.tokens) - self.shown < self.HELD:
            return ""
        return self._give(piece)

    def finish(self) -> str:
        """What is left at the end."""
        return self._give(self._pending())

    def _pending(self) -> str:
        # Decoded behind the tokens before, because a tokenizer may treat a text's beginning apart.
        context = self.tokens[max(0, self.shown - self.HELD) : self.shown]
        decode = functools.partial(self.tokenizer.decode, skip_special_tokens=True)
        return decode(context + self.tokens[self.shown :])[len(decode(context)) :]

    def _give(self, piece: str) -> str:
        self.shown = len(self.tokens)
        return piece
