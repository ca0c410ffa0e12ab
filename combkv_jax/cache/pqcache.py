"""`pqcache`: tokens on the host, and of their keys product-quantization codes on the device, which
tell what a query fetches (PQCache, Zhang et al. 2024)."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp

from combkv_jax.cache import host
from combkv_jax.cache.base import CacheShape, write
from combkv_jax.cache.offloaded import Offloaded
from combkv_jax.errors import RequestError

BLOCK = 512  # tokens of a row coded at once
MOST_BITS = 8  # of a code


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class PQCache(Offloaded):
    """All tokens in host memory. A decoded query sees the first ones, the last `window`, and of the
    others the `top` that have the largest inner product with it, as told by codes.

    A key is cut into parts, and the code of a part is the number of the centroid nearest to it
    (product quantization, Jegou et al. 2011): the inner product of a query with a key is about that
    with its centroids, which is looked up in a table made once a query. The query is the mean of
    those that share the KV head.

    The centroids of a KV head are learned by k-means (Lloyd) over all its keys so far, beginning
    with keys evenly spaced among them. A prefill learns them anew, and codes every token again,
    when the tokens have at least doubled since the last time, so that a prompt in many prefills
    costs little more than one; other tokens get the codes of the nearest centroids there are. (In
    the paper there is one prefill, and tokens fetched often stay on the device for a while.)
    """

    codes: jax.Array  # uint8 [B, K, capacity, parts]
    centroids: jax.Array  # float32 [B, K, 2^bits, D], those of all parts side by side
    learned: jax.Array  # int32 [B], tokens the centroids were learned from
    top: int = dataclasses.field(metadata={"static": True})
    iterations: int = dataclasses.field(metadata={"static": True})

    defaults = {"first": 64, "window": 64, "top": 896, "parts": 2, "bits": 6, "iterations": 8}
    sizes, beside = ("top",), ("first", "window")

    @classmethod
    def create(cls, shape: CacheShape) -> PQCache:
        """options: first (64 tokens), window (64), top (896 tokens fetched), parts (2, of which
        each key is made), bits (6, of a part's code) and iterations (8, of k-means)."""
        first, window, top, parts, bits, iterations = shape.settings("pqcache", **cls.defaults)
        if shape.head_dim % parts:
            raise RequestError(
                f"parts of the pqcache cache is {parts}; it must divide the {shape.head_dim} "
                "channels of a head."
            )
        if bits > MOST_BITS:
            raise RequestError(
                f"bits of the pqcache cache is {bits}; a code has 1 to {MOST_BITS} bits."
            )
        return cls.empty(
            shape,
            first,
            min(window, shape.capacity),
            codes=shape.empty(shape.capacity, parts, jnp.uint8),
            centroids=shape.empty(2**bits, dtype=jnp.float32),
            learned=shape.counter(),
            top=min(top, shape.capacity),
            iterations=iterations,
        )

    def prefill(self, query, key, value, lengths):
        attended, kept = super().prefill(query, key, value, lengths)
        anew = (lengths > 0) & (kept.count >= 2 * self.learned)
        learned = dataclasses.replace(
            kept,
            centroids=kept._learned(anew),
            learned=jnp.where(anew, kept.count, self.learned),
        )
        return attended, learned._coded(jnp.where(anew, 0, self.count))

    def _fetches(self):
        return self.top

    def choose(self, query):
        centroids = self._parts(self.centroids)  # [B, K, C, parts, d]
        mean = self._parts(self._mean(query)[:, :, None])[:, :, 0]  # [B, K, parts, d]
        table = jnp.einsum("bkmd,bkcmd->bkcm", mean, centroids)
        score = sum(
            jnp.take_along_axis(table[..., part], self.codes[..., part].astype(jnp.int32), axis=2)
            for part in range(self.codes.shape[3])
        )  # [B, K, capacity]
        return self._best(score, self.top)

    def nearest(self, key: jax.Array) -> jax.Array:
        """The codes of key [B, K, N, D]: for each part the centroid at the least distance, int32
        [B, K, N, parts]."""
        key, centroids = self._parts(key), self._parts(self.centroids)
        near = jnp.einsum("bknmd,bkcmd->bknmc", key, centroids)
        # |k - c|^2 without |k|^2, which is the same for all, halved and turned round.
        size = jnp.sum(centroids**2, axis=-1).swapaxes(2, 3)[:, :, None]  # [B, K, 1, parts, C]
        return jnp.argmax(near - size / 2, axis=-1)

    def _parts(self, x: jax.Array) -> jax.Array:
        """[B, K, N, D] -> float32 [B, K, N, parts, D / parts]."""
        return x.reshape(*x.shape[:3], self.codes.shape[3], -1).astype(jnp.float32)

    def _learned(self, anew: jax.Array) -> jax.Array:
        """The centroids, learned from all tokens in the rows that are to be learned `anew` [B]."""
        size = self.centroids.shape[2]
        spaced = jnp.arange(size) * self.count[:, None] // size  # [B, C]
        spaced = jnp.broadcast_to(spaced[:, None], self.centroids.shape[:3])
        first = host.take(self.host_key, spaced).astype(jnp.float32)
        first = jnp.where(anew[:, None, None, None], first, self.centroids)

        def step(_, centroids):
            now = dataclasses.replace(self, centroids=centroids)

            def add(key, token, fresh, sums):
                real = fresh & (token < self.count[:, None]) & anew[:, None]  # [B, N]
                mine = now.nearest(key)[..., None] == jnp.arange(size)  # [B, K, N, parts, C]
                mine = (mine & real[:, None, :, None, None]).astype(jnp.float32)
                total = jnp.einsum("bknmc,bknmd->bkcmd", mine, self._parts(key))
                return sums[0] + total, sums[1] + mine.sum(axis=2).swapaxes(2, 3)[..., None]

            shape = self._parts(centroids).shape
            sums = (jnp.zeros(shape), jnp.zeros((*shape[:4], 1)))
            total, members = self._walk(jnp.where(anew, 0, self.count), add, sums)
            mean = total / jnp.maximum(members, 1)  # one without members stays
            mean = jnp.where(members > 0, mean, self._parts(centroids))
            return mean.reshape(centroids.shape)

        return jax.lax.fori_loop(0, self.iterations, step, first)

    def _coded(self, first: jax.Array) -> PQCache:
        """With the codes of tokens `first` [B] and behind."""

        def code(key, token, _, codes):
            old = jax.lax.dynamic_slice_in_dim(codes, token[0], token.shape[0], axis=2)
            is_new = (token >= first[:, None])[:, None, :, None]
            new = jnp.where(is_new, self.nearest(key).astype(codes.dtype), old)
            return jax.lax.dynamic_update_slice_in_dim(codes, new, token[0], axis=2)

        return dataclasses.replace(self, codes=self._walk(first, code, self.codes))

    def _walk(self, first: jax.Array, visit, state):
        """`visit(key [B, K, N, D], token [N], fresh [N], state)` for the tokens on the host in
        blocks, from the least of `first` [B] to the longest row's end. The last block may begin
        within the one before; `fresh` are those that were not visited."""
        size = min(BLOCK, self.host_key.shape[2])

        def block(number, state):
            begin = jnp.minimum(number * size, self.host_key.shape[2] - size)
            token = begin + jnp.arange(size)
            key = host.read(self.host_key, begin, size)
            return visit(key, token, token >= number * size, state)

        begin = jnp.min(jnp.where(first < self.count, first, self.host_key.shape[2])) // size
        end = -(-jnp.max(jnp.where(first < self.count, self.count, 0)) // size)
        return jax.lax.fori_loop(begin, end, block, state)

    def _with(self, key, value):
        kept = super()._with(key, value)
        code = self.nearest(key.swapaxes(1, 2).astype(self.key.dtype))  # [B, K, 1, parts]
        rows = jnp.arange(key.shape[0])
        codes = write(self.codes, code.swapaxes(1, 2), self.count[:, None], rows)
        return dataclasses.replace(kept, codes=codes)
