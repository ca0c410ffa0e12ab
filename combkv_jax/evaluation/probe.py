"""The untrained model with its history visible in any set of layers, cheaply for many sets.

The K/V of every layer are made once. A layer that sees the history takes all of it as ordinary
keys in front of the recent tokens, which is what our form computes before training; any other
layer takes the sinks. Layers run one by one through the same compiled function, so that another
set of layers compiles nothing, and hidden states in front of a layer can be taken up again.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Collection, Sequence

import jax
import jax.numpy as jnp
import numpy as np

from combkv_jax.cache import Chunks, Comb, LayerCache, Packed
from combkv_jax.decoder import Decoder, DecoderLayer
from combkv_jax.encoder import encode_sinks
from combkv_jax.evaluation.metrics import Predicted
from combkv_jax.evaluation.tasks import FactCase, TextCase
from combkv_jax.layers import rotary_angles

ENCODED_TOKENS = 4096  # chunk tokens that go through the model at once


@dataclasses.dataclass(frozen=True, eq=False)
class Questions:
    """Rows of questions, several about one history packed in a row.

    chunks: int32 [B, chunks, chunk_size]. ids, start: int32 [B, T]; token t of a row sees
    `start[t] <= s <= t` of it. row, column: [A], the token that predicts each answer token.
    target: [A], that answer token. question: [A], which question it belongs to.
    """

    chunks: np.ndarray
    ids: np.ndarray
    start: np.ndarray
    row: np.ndarray
    column: np.ndarray
    target: np.ndarray
    question: np.ndarray

    @classmethod
    def from_cases(cls, cases: Sequence[FactCase | TextCase]) -> Questions:
        """One row a case; all cases have the same count and size of chunks."""
        rows = [
            case.questions
            if isinstance(case, FactCase)
            else [(case.tokens[:1], case.tokens[1:])]  # predict everything after the first token
            for case in cases
        ]
        # The last answer token predicts nothing that is asked, so it is left out.
        texts = [[np.concatenate([p, a[:-1]]) for p, a in row] for row in rows]
        width = max(sum(map(len, row)) for row in texts)
        ids = np.zeros((len(rows), width), np.int32)
        start = np.tile(np.arange(width, dtype=np.int32), (len(rows), 1))
        answers, count = [], 0
        for r, (row, pieces) in enumerate(zip(rows, texts, strict=True)):
            at = 0
            for (prompt, answer), piece in zip(row, pieces, strict=True):
                ids[r, at : at + len(piece)] = piece
                start[r, at : at + len(piece)] = at
                first = at + len(prompt) - 1
                answers += [(r, first + i, token, count) for i, token in enumerate(answer)]
                at, count = at + len(piece), count + 1
        chunks = np.stack([np.stack(case.chunks) for case in cases])
        return cls(chunks, ids, start, *np.array(answers, np.int32).T)


@dataclasses.dataclass(frozen=True, eq=False)
class Probe:
    """Questions and the K/V of their history in every layer, [B, K, N, head_dim] each."""

    decoder: Decoder
    questions: Questions
    keys: tuple[jax.Array, ...]
    values: tuple[jax.Array, ...]
    sinks: int

    @classmethod
    def encode(
        cls,
        decoder: Decoder,
        questions: Questions,
        sinks: int,
        advance: Callable[[int], None] = lambda tokens: None,
    ) -> Probe:
        """Encodes every chunk alone, through all layers. sinks: first tokens of a history that
        every layer sees. advance: told of each batch's tokens."""
        rows, count, size = questions.chunks.shape
        chunks = questions.chunks.reshape(-1, size)
        batch = max(1, min(len(chunks), ENCODED_TOKENS // size))
        padded = np.pad(chunks, ((0, -len(chunks) % batch), (0, 0)))
        parts = []
        for first in range(0, len(padded), batch):
            parts.append(_encode(decoder, padded[first : first + batch]))
            jax.block_until_ready(parts[-1])
            advance(min(batch, len(chunks) - first) * size)
        layers = []
        for which in range(2):
            layers.append([])
            for i in range(len(decoder.layers)):
                x = jnp.concatenate([part[i][which] for part in parts])[: len(chunks)]
                x = x.reshape(rows, count * size, *x.shape[2:])
                layers[-1].append(x.swapaxes(1, 2))
        return cls(decoder, questions, *map(tuple, layers), sinks)

    def other_history(self) -> Probe:
        """The same questions, each behind the next row's history."""
        return dataclasses.replace(
            self,
            keys=tuple(jnp.roll(x, -1, axis=0) for x in self.keys),
            values=tuple(jnp.roll(x, -1, axis=0) for x in self.values),
        )

    def states(self, visible: Collection[int]) -> list[jax.Array]:
        """Hidden states [B, T, D] in front of each layer and behind the last one, with the history
        visible in the named layers."""
        states = [self.start]
        for i, layer in enumerate(self.decoder.layers):
            states.append(_layer(layer, states[-1], self._angles, self._entry(i, i in visible)))
        return states

    def predict(self, state: jax.Array, visible: Collection[int], first: int) -> Predicted:
        """Goes on from the hidden state in front of layer `first`."""
        for i in range(first, len(self.decoder.layers)):
            state = _layer(
                self.decoder.layers[i], state, self._angles, self._entry(i, i in visible)
            )
        return self._score(state)

    def predict_without_history(self) -> Predicted:
        """The recent tokens alone, from position 0, without sinks."""
        state = self.start
        angles = rotary_angles(self.decoder.config, self._recent.end - self._recent.start - 1)
        for layer in self.decoder.layers:
            state = _layer(layer, state, angles, self._recent)
        return self._score(state)

    @functools.cached_property
    def start(self) -> jax.Array:
        """Hidden states [B, T, D] in front of layer 0."""
        return self.decoder.embed(jnp.asarray(self.questions.ids))

    @functools.cached_property
    def _recent(self) -> Packed:
        start = jnp.asarray(self.questions.start)
        return Packed(start, jnp.broadcast_to(jnp.arange(1, start.shape[1] + 1), start.shape))

    @functools.cached_property
    def _angles(self) -> tuple[jax.Array, jax.Array]:
        inside = self._recent.end - self._recent.start - 1
        return rotary_angles(self.decoder.config, self.questions.chunks.shape[2] + inside)

    def _entry(self, layer: int, visible: bool) -> LayerCache:
        key, value = self.keys[layer], self.values[layer]
        count = key.shape[2] if visible else min(self.sinks, key.shape[2])
        if not count:
            return self._recent
        key, value = key[:, :, :count], value[:, :, :count]
        return Comb(self._recent, sinks=Chunks(key, value, jnp.int32(0), jnp.int32(count)))

    def _score(self, state: jax.Array) -> Predicted:
        q = self.questions
        nll, right = _answers(self.decoder, state, q.row, q.column, q.target)
        return Predicted(np.asarray(nll), np.asarray(right), q.question)


@jax.jit
def _layer(layer: DecoderLayer, x, angles, entry: LayerCache) -> jax.Array:
    return layer(x, angles, entry, jnp.full(x.shape[0], x.shape[1], jnp.int32))[0]


@jax.jit
def _encode(decoder: Decoder, chunks) -> dict[int, tuple[jax.Array, jax.Array]]:
    positions = jnp.broadcast_to(jnp.arange(chunks.shape[1]), chunks.shape)
    return encode_sinks(decoder, (), chunks, positions)


@jax.jit
def _answers(decoder: Decoder, x, row, column, target) -> tuple[jax.Array, jax.Array]:
    logits = decoder.logits(x[row, column])  # the head is run for answer tokens only
    chosen = jnp.take_along_axis(logits, target[:, None], axis=1)[:, 0]
    nll = jax.nn.logsumexp(logits, axis=1) - chosen
    return nll, jnp.argmax(logits, axis=1) == target
