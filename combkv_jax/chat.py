"""A conversation of any length: what leaves the recent window is compressed, turn by turn."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from combkv_jax import compress as compression
from combkv_jax import generate as generation
from combkv_jax.cache import Cache, History
from combkv_jax.chunking import chunk_tokens
from combkv_jax.errors import RequestError
from combkv_jax.generate import Generation, Sampling
from combkv_jax.language_model import LanguageModel, TextStream


class ChatSession:
    """Keeps the newest turns whole, at most `window` tokens of them, and the rest as a History.

    history: what the conversation starts behind, such as a compressed document.
    Old turns leave in groups that fill a chunk where they can (spec: dialogue chunks), so that
    compressing and prefilling anew happen once a chunk and not once a turn.
    """

    def __init__(
        self,
        language_model: LanguageModel,
        *,
        window: int,
        history: History | None = None,
        max_new_tokens: int = 256,
        sampling: Sampling | None = None,
    ):
        if max_new_tokens >= window:
            raise RequestError(
                f"window is {window}; it must be larger than max-new-tokens, {max_new_tokens}."
            )
        config = language_model.config
        offset = 0 if config.is_original else config.chunk_size
        if offset + window > config.text.max_position_embeddings:
            raise RequestError(
                f"window is {window}; behind a chunk of {offset} this model's positions leave "
                f"room for {config.text.max_position_embeddings - offset}."
            )
        self.lm, self.history, self.window = language_model, history, window
        self.max_new_tokens, self.sampling = max_new_tokens, sampling or Sampling()
        self.messages: list[dict[str, str]] = []
        self.turns: list[np.ndarray] = []  # tokens of the turns still kept whole
        self._cache: Cache | None = None  # holds all of `turns` but `_behind` tokens
        self._behind = np.zeros(0, np.int32)

    def send(self, text: str) -> Iterator[str]:
        """One user message: streams the reply."""
        if not text.strip():
            raise RequestError("the message is empty; type something.")
        message = {"role": "user", "content": text}
        asked = self._next_tokens(message)
        if len(asked) + self.max_new_tokens > self.window:
            raise RequestError(
                f"the message has {len(asked)} tokens; with a window of {self.window} and "
                f"{self.max_new_tokens} for the reply, {self.window - self.max_new_tokens} fit."
            )
        self._make_room(len(asked) + self.max_new_tokens)
        prompt = np.concatenate([self._behind, asked])
        if self._cache is None:
            self._cache = generation.new_cache(self.lm.model, self.window + 1, self.history)
            prompt = np.concatenate([*self.turns, asked])
        logits, cache = generation.prefill(self.lm.model, self._cache, [prompt])
        run = Generation.start(
            self.lm.model, cache, logits, self.sampling, self.lm.stop_tokens(), self.max_new_tokens
        )
        yield from self._reply(run, message, asked)

    def _reply(self, run: Generation, message: dict, asked: np.ndarray) -> Iterator[str]:
        drawn, stops = [], set(self.lm.stop_tokens())
        pieces, said = TextStream(self.lm.tokenizer), []
        try:
            for tokens in run:
                drawn.append(int(tokens[0]))
                piece = "" if drawn[-1] in stops else pieces.push(drawn[-1])
                if piece:
                    said.append(piece)
                    yield piece
            if piece := pieces.finish():
                said.append(piece)
                yield piece
        finally:  # also when the reader leaves in the middle of a reply
            self.messages += [message, {"role": "assistant", "content": "".join(said)}]
            self.turns.append(np.concatenate([asked, np.asarray(drawn, np.int32)]))
            self._cache, self._behind = run.cache, self.turns[-1][-1:]

    def _next_tokens(self, message: dict[str, str]) -> np.ndarray:
        """The tokens that a message and the opening of the reply add to the conversation."""
        tokenizer, messages = self.lm.tokenizer, [*self.messages, message]
        if not getattr(tokenizer, "chat_template", None):
            return self.lm.tokens(("\n" if self.messages else "") + message["content"])
        text = self.lm.render(messages, add_generation_prompt=True)
        if not self.messages:
            return (
                self.lm.without_bos(self.lm.tokens(text)) if self.history else self.lm.tokens(text)
            )
        # The last reply is there as it was drawn; what closes it and all behind it is new.
        opening = self.lm.render(self.messages[:-1], add_generation_prompt=True)
        reply = self.messages[-1]["content"].strip()
        place = text.find(reply, len(opening))
        tokens = self.lm.tokens(text[max(place, len(opening)) + len(reply) :])
        drawn = self.turns[-1][-1]
        return tokens[1:] if drawn in self.lm.stop_tokens() and tokens[0] == drawn else tokens

    def _make_room(self, needed: int) -> None:
        """Compresses the oldest turns until `needed` more tokens fit beside the others."""
        size = sum(map(len, self.turns))
        if size + needed <= self.window:
            return
        leaving: list[np.ndarray] = []
        gone, chunk = 0, self.lm.config.chunk_size
        while self.turns and (
            size - gone + needed > self.window
            or gone + len(self.turns[0]) <= -(-gone // chunk) * chunk
        ):
            leaving.append(self.turns.pop(0))
            gone += len(leaving[-1])
        chunks = chunk_tokens(np.concatenate(leaving), chunk)
        self.history = compression.compress(self.lm.model, [chunks], history=self.history)
        self._cache = None
        self._behind = np.zeros(0, np.int32)
