"""`infllm`: tokens on the host in blocks, and a query fetches the most relevant ones (InfLLM, Xiao
et al. 2024)."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp

from combkv_jax.attention import Attended, attention, mass, merge
from combkv_jax.cache.base import CacheShape, newest, take, write
from combkv_jax.cache.offloaded import Offloaded


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class InfLLM(Offloaded):
    """All tokens in host memory, those behind the first ones in blocks. A decoded query sees the
    first tokens, the local window, and the blocks whose representatives it is most like.

    The representatives of a block are its keys with the largest mass: a token's softmax weights,
    summed over its own query and the next `window - 1`, in whose window it lies, and over the query
    heads that share the KV head. A block is told by them once `window` newer tokens stand behind
    it; until then its tokens are on the device, and belong to the local window. A block's relevance
    is the sum of the inner products of its representatives with the queries that share the KV head,
    which is that of their means, so their mean is all that the device keeps.

    A prefill attends to everything, and keys keep the positions they came with. (In the paper a
    prefill fetches blocks, too, all that lies beyond the window counts as one distance away, and
    blocks fetched lately stay on the device for a while.)
    """

    mass: jax.Array  # float32 [B, K, slots, 1], of the tokens in the ring
    block_key: jax.Array  # [B, K, blocks, D], the mean of each block's representatives
    window: int = dataclasses.field(metadata={"static": True})
    block: int = dataclasses.field(metadata={"static": True})
    representatives: int = dataclasses.field(metadata={"static": True})
    best: int = dataclasses.field(metadata={"static": True})  # blocks a query fetches

    defaults = {"first": 128, "window": 256, "block": 128, "representatives": 4, "top": 640}
    sizes, beside, unit = ("top",), ("first", "window"), "block"

    @classmethod
    def create(cls, shape: CacheShape) -> InfLLM:
        """options: first (128 tokens), window (256), block (128 tokens), representatives (4 a
        block) and top (640 tokens fetched, in whole blocks)."""
        first, window, block, representatives, top = shape.settings("infllm", **cls.defaults)
        slots = min(window + block, shape.capacity)
        # One that nobody fetches, where there is room for none.
        blocks = max((shape.capacity - first - window) // block, 1)
        return cls.empty(
            shape,
            first,
            slots,
            mass=shape.empty(slots, 1, jnp.float32),
            block_key=shape.empty(blocks),
            window=window,
            block=block,
            representatives=min(representatives, block),
            best=min(-(-top // block), blocks),
        )

    def prefill(self, query, key, value, lengths):
        attended, kept = super().prefill(query, key, value, lengths)
        line_key = self._line(self.key, key)  # [B, K, slots + T, D]
        index = self.count[:, None] + jnp.arange(key.shape[1])
        end = jnp.where(index < kept.count[:, None], self._place(index) + 1, 0)  # padding adds none
        start = jnp.maximum(end - self.window, 0)
        line_mass = self._line(self.mass, jnp.zeros((*key.shape[:3], 1)))
        line_mass += mass(query, line_key, attended.lse, start, end)[..., None]
        block = self._blocks()[:, None] + jnp.arange(key.shape[1] // self.block + 1)
        kept = dataclasses.replace(kept, mass=self._ring(line_mass, kept.start, lengths))
        return attended, kept._told(line_key, line_mass, block, self._place)

    def extend(self, query, key, value, lengths):
        if lengths is not None:
            return self.prefill(query, key, value, lengths)
        kept = self.append(key, value)
        attended = kept.attend(query)
        token = newest(kept.count, kept.key.shape[2])
        gained = mass(query, kept.key, attended.lse, jnp.int32(0), kept._held()[:, None])
        is_near = token > kept.count[:, None] - 1 - self.window
        gained = jnp.where(is_near[:, None], gained, 0.0)[..., None]
        return attended, dataclasses.replace(kept, mass=kept.mass + gained)

    def _fetches(self):
        return self.best * self.block

    def choose(self, query):
        score = jnp.einsum(
            "bkd,bknd->bkn",
            self._mean(query),
            self.block_key,
            preferred_element_type=jnp.float32,
        )
        blocks = self._blocks()
        told = jnp.arange(score.shape[2]) < blocks[:, None]
        best = jax.lax.top_k(jnp.where(told[:, None], score, -jnp.inf), self.best)[1]
        token = self._tokens(best).reshape(*best.shape[:2], -1)
        # What counts for nothing must lie within the host's tokens all the same.
        token = jnp.minimum(token, self.host_key.shape[2] - 1)
        return token, jnp.minimum(blocks, self.best) * self.block

    def _attend_ring(self, query) -> Attended:
        """Blocks leave the ring as a whole, so what is seen of it is an interval that may go round
        its end."""
        slots, oldest = self.key.shape[2], self._oldest()
        start = self._slot(oldest[:, None])  # [B, 1]
        end = start + (self.count - oldest)[:, None]
        parts = (start, jnp.minimum(end, slots)), (jnp.int32(0), end - slots)
        return merge(*(attention(query, self.key, self.value, *part) for part in parts))

    def _oldest(self):
        behind = self._tokens(self._blocks())[:, 0]
        return jnp.minimum(behind, self.count)

    def _blocks(self) -> jax.Array:
        """Blocks that are told by their representatives, int32 [B]."""
        behind = self.count - self.first_key.shape[2] - self.window
        return jnp.maximum(behind // self.block, 0)

    def _tokens(self, block: jax.Array) -> jax.Array:
        """The tokens of each block [...]: int32 [..., block]."""
        return self.first_key.shape[2] + block[..., None] * self.block + jnp.arange(self.block)

    def _with(self, key, value):
        kept = super()._with(key, value)
        place, rows = self._slot(self.count[:, None]), jnp.arange(key.shape[0])
        none = jnp.zeros((*key.shape[:3], 1))
        kept = dataclasses.replace(kept, mass=write(self.mass, none, place, rows))
        # Always the block that is due next, and written only when it is: no branch, no copy.
        return kept._told(kept.key, kept.mass, self._blocks()[:, None], kept._slot)

    def _told(self, key, mass, block, place) -> InfLLM:
        """With the representatives of blocks `block` [B, N], as far as they are due: key and mass
        [B, K, P, ...] of tokens that stand at `place(token)`."""
        batch, heads = key.shape[:2]
        token = place(self._tokens(block).reshape(batch, -1))  # [B, N * block]
        weight = take(mass, token).reshape(batch, heads, -1, self.block)
        best = jax.lax.top_k(weight, self.representatives)[1]  # [B, K, N, representatives]
        token = token.reshape(batch, 1, -1, self.block)
        token = jnp.take_along_axis(jnp.broadcast_to(token, weight.shape), best, axis=3)
        chosen = take(key, token.reshape(batch, heads, -1)).reshape(*best.shape, -1)
        mean = jnp.mean(chosen, axis=3, dtype=jnp.float32)  # [B, K, N, D]
        index = jnp.where(block < self._blocks()[:, None], block, self.block_key.shape[2])
        rows = jnp.arange(batch)
        told = write(self.block_key, mean.swapaxes(1, 2), index, rows)
        return dataclasses.replace(self, block_key=told)
