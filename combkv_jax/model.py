"""CombLlama: a frozen Llama decoder with its history compressed into K/V of a few layers.

One class for a plain Llama (no cross layers), the original form and ours. Modules are plain
pytrees: every method is a pure function of the module and its arguments, ready for `jax.jit`.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from combkv_jax.cache import Banded, Cache, Chunks, Comb, History, Packed
from combkv_jax.config import CombConfig
from combkv_jax.decoder import CrossLayer, Decoder, HistoryAttention
from combkv_jax.encoder import ChunkEncoder, KeysValues, encode_sinks, tap_decoder
from combkv_jax.errors import RequestError
from combkv_jax.layers import Declaration, rotary_angles


class CombLlama(nnx.Module):
    """The decoder, one history block a cross layer, and the original's encoder if it has one.

    A fresh instance holds declarations; `build` or `init` make a usable model.
    """

    def __init__(self, config: CombConfig):
        self.config = config
        self.decoder = Decoder(config.text)
        if config.is_original:
            self.history = nnx.List([CrossLayer(config) for _ in config.cross_layers])
            self.encoder = ChunkEncoder(config)
        else:
            self.history = nnx.List([HistoryAttention(config, i) for i in config.cross_layers])

    @property
    def dtype(self) -> jnp.dtype:
        """The weights' dtype, which activations and caches take too."""
        return self.decoder.embed_tokens.weight[...].dtype

    @property
    def blocks(self) -> dict[int, HistoryAttention | CrossLayer]:
        """Decoder layer -> its view of the history."""
        return dict(zip(self.config.cross_layers, self.history, strict=True))

    # Encoding

    def encode_chunks(
        self,
        ids: jax.Array,
        index: jax.Array,
        start: jax.Array,
        stop: jax.Array,
        *,
        longest: int | None = None,
        remat: Callable | None = None,
    ) -> list[KeysValues]:
        """K/V [B, T, K, head_dim] of each cross layer for chunk tokens ids [B, T]; index is each
        token's place in its row, and its chunk is `start <= index < stop` there, all [B, T].
        longest: no chunk has more tokens; chunks side by side in long rows are then faster.
        remat: as in `Decoder.__call__`, where the encoder is trained."""
        config = self.config
        if config.is_original:  # bidirectional, positions from 0
            positions, end = index - start, stop
        else:  # causal; the last token of a chunk stands at chunk_size - 1
            positions, end = config.chunk_size - stop + index, index + 1
        x = self.decoder.embed(ids)
        angles = rotary_angles(config.text, positions)
        entry = Packed(start, end)
        if longest and ids.shape[1] > 3 * longest:
            entry = Banded(start, end, longest)
        if config.is_original:
            return self.encoder(x, angles, entry, remat=remat)
        return tap_decoder(self.decoder, self.blocks, x, angles, entry)

    def history_key(self, cross_layer: int, key: jax.Array) -> jax.Array:
        """The key as the cross layer (by its number among them) compares it with queries."""
        if self.config.is_original:
            return self.history[cross_layer].cross_attn.k_norm(key)
        return key

    def encode_sinks(self, ids: jax.Array, length: jax.Array) -> dict[int, KeysValues]:
        """K/V [B, S, K, head_dim] of the first tokens ids [B, S] of histories whose first chunk
        has `length` [B] tokens, for every layer that keeps no history (`lse` form)."""
        positions = self.config.chunk_size - length[:, None] + jnp.arange(ids.shape[1])
        return encode_sinks(self.decoder, self.config.cross_layers, ids, positions)

    def encode(self, chunk_ids: jax.Array, cu_seqlens_chunk: jax.Array) -> list[KeysValues]:
        """Packed chunks -> one (K, V) a cross layer, [total, K, head_dim] each.

        chunk_ids: int [total] or [1, total]; cu_seqlens_chunk: int [chunks + 1], cumulative
        lengths from 0. Tokens past the last length are padding. In the original form K is as its
        encoder gives it, before the cross layer's k_norm; in ours it carries rotary.
        """
        ids = jnp.asarray(chunk_ids).reshape(1, -1)
        cumulative = jnp.asarray(cu_seqlens_chunk).reshape(1, -1)
        states = self.encode_chunks(ids, *_segments(cumulative, ids.shape[1])[:3])
        return [(key[0], value[0]) for key, value in states]

    # Packed batches

    def __call__(self, batch: Mapping[str, Any]) -> jax.Array:
        """Logits of a packed batch, float32 [total, V].

        batch: input_ids [total] or [1, total] with cu_seqlens_q [samples + 1]; and, when there is
        history, chunk_ids, cu_seqlens_chunk [chunks + 1] and cu_seqlens_k [samples + 1] (the
        chunk tokens of each sample). Positions follow from the lengths. Tokens past the last
        cumulative length are padding, and their logits mean nothing.
        """
        packs = {name: jnp.asarray(x).reshape(1, -1) for name, x in batch.items()}
        return self.decoder.logits(self.hidden_states(packs)[0])

    def hidden_states(
        self,
        packs: Mapping[str, Any],
        *,
        longest: int | None = None,
        remat: Callable | None = None,
    ) -> jax.Array:
        """Hidden states before the final norm, [R, total, D], of R packed batches of one shape:
        what `__call__` takes, with an axis in front. longest: as in `encode_chunks`. remat: as in
        `Decoder.__call__`."""
        ids = packs["input_ids"]
        index, start, _, sample = _segments(packs["cu_seqlens_q"], ids.shape[1])
        positions = index - start
        recent = Packed(start, index + 1)
        entries: list = [recent] * self.config.text.num_hidden_layers
        if np.size(packs.get("chunk_ids", ())) and self.config.cross_layers:
            history = self._packed_history(packs, sample, longest=longest, remat=remat)
            positions = positions + self.recent_offset(history.count)
            entries = self.entries(history, recent)
        lengths = jnp.full(ids.shape[0], ids.shape[1], jnp.int32)
        cache = Cache(tuple(entries), positions[:, 0])
        blocks = self._blocks_for(entries)
        x, _ = self.decoder(ids, positions, cache, lengths, blocks, remat=remat)
        return x

    def _packed_history(self, packs: Mapping[str, Any], sample: jax.Array, **options) -> History:
        """The history of each token [R, total] of packed batches, by the sample it is in."""
        cu, cu_chunk = packs["cu_seqlens_k"], packs["cu_seqlens_chunk"]
        chunk_ids = packs["chunk_ids"]
        rows, total = chunk_ids.shape
        segments = _segments(cu_chunk, total)[:3]
        states = self.encode_chunks(chunk_ids, *segments, **options)

        def of_token(x):
            """Of each token's sample; past the last one, which padding belongs to, 0."""
            return jnp.take_along_axis(jnp.pad(x, ((0, 0), (0, 1))), sample, axis=1)

        count = jnp.diff(cu)
        start = of_token(cu[:, :-1])
        kept = [
            Chunks(
                self.history_key(i, key).swapaxes(1, 2),
                value.swapaxes(1, 2),
                start,
                start + of_token(count),
            )
            for i, (key, value) in enumerate(states)
        ]
        sinks = {}
        width = self.config.sink_tokens
        if not self.config.is_original and width:
            # Of the first chunk of each sample, for every layer that keeps no history.
            after = _at(cu_chunk, _number_of(cu_chunk, cu[:, :-1]) + 1)
            length = jnp.where(count > 0, after - cu[:, :-1], 0)
            place = jnp.minimum(cu[:, :-1, None] + jnp.arange(width), total - 1)
            ids = _at(chunk_ids, place.reshape(rows, -1)).reshape(-1, width)
            start = sample * width
            end = start + of_token(jnp.minimum(length, width))
            for i, pair in self.encode_sinks(ids, length.reshape(-1)).items():
                key, value = (x.reshape(rows, -1, *x.shape[2:]).swapaxes(1, 2) for x in pair)
                sinks[i] = Chunks(key, value, start, end)
        return self.make_history(kept, sinks, of_token(count))

    def make_history(
        self, kept: list[Chunks], sinks: Mapping[int, Chunks], count: jax.Array
    ) -> History:
        """The History of `kept` chunks, one a cross layer, and `sinks` by decoder layer."""
        cross = dict(zip(self.config.cross_layers, kept, strict=True))
        layers = range(self.config.text.num_hidden_layers)
        return History(
            tuple(cross.get(i, sinks.get(i)) for i in layers),
            count,
            tuple(i in cross for i in layers),
        )

    def entries(self, history: History, recent: Packed) -> list[Comb]:
        """The cache entries of packed recent tokens behind a history."""
        nearby = recent.nearby(self.config.summary_tokens)
        return [history.entry(i, recent, nearby) for i in range(len(history.layers))]

    def recent_offset(self, count: jax.Array) -> jax.Array:
        """Position of the first recent token behind a history of `count` tokens: in our form
        recent tokens stand right behind one chunk, in the original they start at 0."""
        size = 0 if self.config.is_original else self.config.chunk_size
        return jnp.where(count > 0, size, 0).astype(jnp.int32)

    # Cached decoding

    def prefill(self, cache: Cache, ids: jax.Array, lengths: jax.Array) -> tuple[jax.Array, Cache]:
        """T more tokens a row: ids [B, T], of which the first `lengths` [B] are real (at least
        one). Returns float32 logits [B, V] of each row's last real token, and the cache."""
        positions = cache.position[:, None] + jnp.arange(ids.shape[1])
        x, cache = self.decoder(ids, positions, cache, lengths, self._blocks_for(cache.layers))
        last = jnp.take_along_axis(x, (lengths - 1)[:, None, None], axis=1)[:, 0]
        return self.decoder.logits(last), cache

    def decode_step(self, cache: Cache, tokens: jax.Array) -> tuple[jax.Array, Cache]:
        """One more token a row, tokens [B]: float32 logits [B, V] of the next, and the cache."""
        positions = cache.position[:, None]
        blocks = self._blocks_for(cache.layers)
        x, cache = self.decoder(tokens[:, None], positions, cache, None, blocks)
        return self.decoder.logits(x[:, 0]), cache

    def _blocks_for(self, entries) -> dict[int, HistoryAttention | CrossLayer]:
        """The blocks whose layer has a history in front of it."""
        return {
            i: block
            for i, block in self.blocks.items()
            if isinstance(entries[i], Comb) and entries[i].chunks is not None
        }


def _segments(cumulative, total: int) -> tuple[jax.Array, jax.Array, jax.Array, jax.Array]:
    """Of each of `total` packed tokens, [R, total]: its place, the borders of its segment, and
    the segment's number, from cumulative lengths [R, segments + 1]. A padding token is a segment
    of itself, numbered past the last."""
    cumulative = jnp.asarray(cumulative).astype(jnp.int32)
    index = jnp.arange(total, dtype=jnp.int32)
    index = jnp.broadcast_to(index, (cumulative.shape[0], total))
    number = _number_of(cumulative, index)
    real = index < cumulative[:, -1:]
    start = jnp.where(real, _at(cumulative, number), index)
    stop = jnp.where(real, _at(cumulative, number + 1), index + 1)
    return index, start, stop, jnp.where(real, number, cumulative.shape[1] - 1)


def _number_of(cumulative: jax.Array, index: jax.Array) -> jax.Array:
    """The number of the segment that each index [R, n] lies in."""
    search = functools.partial(jnp.searchsorted, side="right")
    return jax.vmap(search)(cumulative, index).astype(jnp.int32) - 1


def _at(x: jax.Array, index: jax.Array) -> jax.Array:
    """x [R, m] at index [R, n], the last one where an index is past it."""
    return jnp.take_along_axis(x, jnp.minimum(index, x.shape[1] - 1), axis=1)


# Parameters by name


def _names(model: CombLlama) -> list[str]:
    paths, _ = jax.tree_util.tree_flatten_with_path(model)
    names = (jax.tree_util.keystr(path, simple=True, separator=".") for path, _ in paths)
    return [name.removesuffix(".value") for name in names]


def parameters(model: CombLlama) -> dict[str, Any]:
    """The model's arrays by name, such as `decoder.layers.0.self_attn.q_proj.weight`."""
    return dict(zip(_names(model), jax.tree.leaves(model), strict=True))


def declarations(config: CombConfig) -> dict[str, Declaration]:
    """Shape, logical axes, initialiser and dtype of every parameter, by name."""
    return parameters(CombLlama(config))


def build(config: CombConfig, arrays: Mapping[str, Any]) -> CombLlama:
    """The model of these arrays (or shapes, or shardings: any leaf). Raises RequestError that
    lists every name that is missing or unknown."""
    model = CombLlama(config)
    names = _names(model)
    missing, unknown = set(names) - set(arrays), set(arrays) - set(names)
    if missing or unknown:
        parts = [
            f"{label} {', '.join(sorted(some))}"
            for label, some in (("lacks", missing), ("has unknown", unknown))
            if some
        ]
        raise RequestError(f"the set of tensors {' and '.join(parts)}.")
    return jax.tree.unflatten(jax.tree.structure(model), [arrays[name] for name in names])


def init(config: CombConfig, key: jax.Array, dtype: Any = jnp.float32) -> CombLlama:
    """A model of random weights."""
    declared = declarations(config)
    keys = jax.random.split(key, len(declared))
    return build(
        config,
        {name: d.create(k, dtype) for (name, d), k in zip(declared.items(), keys, strict=True)},
    )


def abstract(config: CombConfig, dtype: Any) -> CombLlama:
    """The model as `jax.ShapeDtypeStruct`s, for compiling without weights."""
    return build(
        config,
        {
            name: jax.ShapeDtypeStruct(d.shape, np.dtype(d.dtype or dtype))
            for name, d in declarations(config).items()
        },
    )


def starts_as(config: CombConfig) -> dict[str, str]:
    """For a plain Llama that gets a history: the decoder tensor each new one is first a copy of.
    New tensors not named here start as declared (gates closed, norms at one, summaries drawn)."""
    decoder = set(declarations(CombConfig(config.text, "decoder", "lse", (), config.chunk_size)))
    copies = {}
    for name in declarations(config):
        match = re.fullmatch(r"(history|encoder)(?:\.(layers|[kv]_proj))?\.(\d+)\.(.+)", name)
        if not match or match[4].endswith(("q_norm.weight", "k_norm.weight")):
            continue
        layer = f"decoder.layers.{config.cross_layers[int(match[3])]}"
        tail = match[4].replace("cross_attn.", "self_attn.")
        if match[2] in ("k_proj", "v_proj"):
            tail = f"self_attn.{match[2]}.{tail}"
        for source in (f"{layer}.{tail}", f"{layer}.self_attn.{tail}"):
            if source in decoder:
                copies[name] = source
    return copies


def is_untrained(model: CombLlama) -> bool:
    """Whether every gate of the history still stands where conversion put it."""
    gates = ("bias", "bias_slope", "scale", "scale_slope", "query_gate", "key_gate")
    gates += ("cross_attn_attn_gate", "cross_attn_mlp_gate")
    return not any(
        bool(jnp.any(array != 0))
        for name, array in parameters(model).items()
        if name.startswith("history.") and name.rsplit(".", 1)[-1] in gates
    )
