"""A context read once into a cache, and what is asked or goes on behind it.

What is behind is decoded token by token, the last token of a question included: policies that look
tokens up do so in decoding alone, and a prefill of theirs attends to everything.
"""

from __future__ import annotations

import dataclasses
import functools
import time
from collections.abc import Iterable, Sequence

import jax
import jax.numpy as jnp
import numpy as np

from combkv_jax import generate
from combkv_jax.cache import Cache, full_cache_bytes, nbytes
from combkv_jax.chunking import split_history
from combkv_jax.compress import compress
from combkv_jax.errors import RequestError
from combkv_jax.evaluation.budgets import ROOM, Setting, measure
from combkv_jax.evaluation.cases import Question
from combkv_jax.generate import Borrowed
from combkv_jax.language_model import LanguageModel
from combkv_jax.model import CombLlama

BLOCK = 8  # tokens decoded by one call


@dataclasses.dataclass
class Reading:
    """A context in a cache. held: as `budgets.measure`, of the live arrays."""

    lm: LanguageModel
    setting: Setting
    changed: Cache
    borrowed: Borrowed
    held: dict[str, int]

    @classmethod
    def of(cls, lm: LanguageModel, setting: Setting, tokens: np.ndarray) -> Reading:
        """Reads tokens int32 [n], `setting.tokens` of them."""
        history, recent = None, tokens
        if setting.policy == "comb":
            window, size = setting.options["window"], lm.config.chunk_size
            chunks, recent = split_history(tokens, window, size)
            if chunks:
                history = compress(lm.model, [chunks], bits=setting.options["bits"])
        logits, cache = generate.prefill(lm.model, setting.empty(lm, history), [recent])
        generate.check_finite(logits)
        return cls(lm, setting, *cache.split(), measure(cache))

    def answers(self, questions: Sequence[Question]) -> list[str]:
        """The greedy answer of each, behind a copy of the cache: as many questions at once as have
        copies that take no more room than one full cache."""
        own = sum(nbytes(self.changed).values())
        dtype, text = self.lm.model.dtype, self.lm.config.text
        full = full_cache_bytes(text, self.setting.tokens + self.setting.room, dtype)
        # Powers of two, so that few counts compile anew.
        most = 1 << (max(1, full // own).bit_length() - 1)
        rows = min(most, 1 << (len(questions) - 1).bit_length())
        answers = []
        for first in range(0, len(questions), rows):
            some = questions[first : first + rows]
            answers += self._answer([*some, *[some[0]] * (rows - len(some))])[: len(some)]
        return answers

    def _answer(self, questions: Sequence[Question]) -> list[str]:
        changed = self._branch(len(questions))
        prompts = [question.prompt for question in questions]
        read = [prompt[:-1] for prompt in prompts]
        changed = generate.prefill(self.lm.model, changed.join(self.borrowed), read)[1].split()[0]
        stop = self.lm.stop_tokens()
        rows = np.array([[prompt[-1]] for prompt in prompts], np.int32)  # and what comes behind
        longest = max(question.new_tokens for question in questions)
        while rows.shape[1] <= longest and not np.isin(rows[:, 1:], stop).any(axis=1).all():
            tokens = np.repeat(rows[:, -1:], BLOCK, axis=1)
            changed, drawn, _ = _decode(self.lm.model, changed, self.borrowed, tokens, 1)
            rows = np.concatenate([rows, np.asarray(drawn)], axis=1)
        answers = []
        for row, question in zip(rows[:, 1:], questions, strict=True):
            ends = np.flatnonzero(np.isin(row, stop))
            last = min([question.new_tokens, *ends[:1]])
            answers.append(self.lm.text(row[:last].tolist()))
        return answers

    def _branch(self, rows: int) -> Cache:
        """A copy for so many rows, which a step may use up."""

        def copy(x: jax.Array) -> jax.Array:
            if rows > 1 and x.shape[0] == 1:  # what is not of a row alone has more
                return jnp.repeat(x, rows, axis=0)
            return jax.device_put(x, x.sharding, may_alias=False)

        return jax.tree.map(copy, self.changed)

    def logits(self, tokens: np.ndarray) -> np.ndarray:
        """What is said behind each of tokens int32 [n], n a multiple of BLOCK, which are decoded
        one after the other: float32 [n, V]. The cache has grown by them then."""
        found = []
        for block in tokens.reshape(-1, 1, BLOCK):
            self.changed, _, logits = _decode(
                self.lm.model, self.changed, self.borrowed, block, BLOCK
            )
            found.append(np.asarray(logits[0]))
        return np.concatenate(found)

    def tokens_a_second(self) -> float:
        """How fast one row is decoded. The cache has grown by 3 * BLOCK tokens then."""
        tokens = np.zeros(BLOCK, np.int32)
        self.logits(tokens)  # compiles
        begin = time.perf_counter()
        for _ in range(2):
            self.logits(tokens)
        return 2 * BLOCK / (time.perf_counter() - begin)


def room(questions: Iterable[Question]) -> int:
    """The tokens that a cache needs behind a context for any of these questions: ROOM, or as many
    times that as are needed. Raises RequestError for questions that cannot be asked."""
    most = 0
    for question in questions:
        if len(question.prompt) < 2 or question.new_tokens < 1:
            raise RequestError(
                f"a question has {len(question.prompt)} tokens and its answer "
                f"{question.new_tokens}; at least 2 and 1 are needed."
            )
        most = max(most, len(question.prompt) + question.new_tokens + BLOCK)
    return max(1, -(-most // ROOM)) * ROOM


@functools.partial(jax.jit, donate_argnames="changed")
def _decode(model: CombLlama, changed: Cache, borrowed: Borrowed, tokens, given) -> tuple:
    """Decodes n tokens a row: the first `given` of tokens [B, n], and then the likeliest behind
    each. Returns the cache, the likeliest tokens int32 [B, n] behind each, and float32 logits
    [B, n, V]."""

    def step(carry, now):
        changed, likeliest = carry
        token, is_given = now
        token = jnp.where(is_given, token, likeliest)
        logits, cache = model.decode_step(changed.join(borrowed), token)
        likeliest = jnp.argmax(logits, axis=1).astype(jnp.int32)
        return (cache.split()[0], likeliest), (likeliest, logits)

    each = (tokens.T, jnp.arange(tokens.shape[1]) < given)
    (changed, _), found = jax.lax.scan(step, (changed, tokens[:, 0]), each)
    return changed, *(x.swapaxes(0, 1) for x in found)
