"""`h2o`: the recent tokens and those that got most attention so far (Zhang et al. 2023)."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp

from combkv_jax.attention import Attended, attention, mass
from combkv_jax.cache.base import CacheShape, LayerCache, line_up, newest, take, write


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class H2O(LayerCache):
    """For each KV head `recent` newest tokens and, of those before them, the heaviest.

    A token's mass is its softmax weight summed over all queries since it came and over the query
    heads that read it. The first `recent` slots are a ring (token i in slot i mod recent) and the
    rest are heavy tokens in any order; a row's slots fill from the front. A token that leaves the
    ring takes the place of the lightest heavy one, or goes if it is lighter still. A prefill sees
    all of its own tokens and drops what is too much afterwards, so a prompt in several prefills
    is judged piece by piece.
    """

    key: jax.Array  # [B, K, S, D]
    value: jax.Array
    mass: jax.Array  # float32 [B, K, S, 1]
    count: jax.Array  # int32 [B], tokens so far
    recent: int = dataclasses.field(metadata={"static": True})

    defaults = {"heavy": 512, "recent": 512}
    sizes = ("heavy", "recent")

    @classmethod
    def create(cls, shape: CacheShape) -> H2O:
        """options: heavy and recent, tokens kept of each kind (512 and 512)."""
        heavy, recent = shape.settings("h2o", **cls.defaults)
        recent = min(recent, shape.capacity)
        slots = recent + max(1, min(heavy, shape.capacity - recent))
        return cls(
            shape.empty(slots),
            shape.empty(slots),
            shape.empty(slots, 1, jnp.float32),
            shape.counter(),
            recent,
        )

    def prefill(self, query, key, value, lengths):
        recent, slots = self.recent, self.key.shape[2]
        filled = self._filled()
        step = jnp.arange(key.shape[1])
        place = jnp.arange(slots + key.shape[1])  # in one line: what is kept, then what is new

        def line(kept, new):
            return line_up(kept, new, place[None], filled)

        line_key, line_value = line(self.key, key), line(self.value, value)
        end = filled[:, None] + step + 1
        attended = attention(query, line_key, line_value, jnp.int32(0), end)
        weighs = jnp.where(step < lengths[:, None], end, 0)  # padding does not
        gained = mass(query, line_key, attended.lse, jnp.int32(0), weighs)[..., None]
        weight = line(self.mass, jnp.zeros((*key.shape[:3], 1))) + gained  # [B, K, S + T, 1]

        # The heaviest of what is older than the ring's new tokens.
        count = self.count + lengths
        token = self.count[:, None] + place - filled[:, None]
        in_ring = newest(self.count, recent)
        older = jnp.concatenate([in_ring, jnp.full_like(token[:, recent:], -1)], axis=1)
        token = jnp.where(place < filled[:, None], older, token)
        competes = (place < (filled + lengths)[:, None]) & (token < count[:, None] - recent)
        rank = jnp.where(competes[:, None], weight[..., 0], -jnp.inf)
        heavy = jax.lax.top_k(rank, slots - recent)[1]  # [B, K, heavy]
        held = newest(count, recent)
        before = self.count[:, None]
        ring = jnp.where(held < before, jnp.arange(recent), filled[:, None] + held - before)
        ring = jnp.broadcast_to(ring[:, None], (*heavy.shape[:2], recent))
        source = jnp.concatenate([ring, heavy], axis=2)
        kept = (take(x, source) for x in (line_key, line_value, weight))
        return attended, H2O(*kept, count, recent)

    def append(self, key, value):
        recent, slots = self.recent, self.key.shape[2]
        place = (self.count % recent)[:, None]
        leaving = [take(x, place) for x in (self.key, self.value, self.mass)]  # [B, K, 1, ...]
        heavy = self.mass[:, :, recent:, 0]
        lightest = recent + jnp.argmin(heavy, axis=2)
        stays = leaving[2][:, :, 0, 0] > jnp.min(heavy, axis=2)
        # A slot that is free, the lightest one's, or none.
        room = jnp.where(self.count < recent, slots, self.count)[:, None]
        goes_to = jnp.where(self.count[:, None] < slots, room, jnp.where(stays, lightest, slots))
        rows = jnp.arange(key.shape[0])
        coming = (key, value, jnp.zeros((*key.shape[:3], 1)))

        def moved(buffer, old, new):
            buffer = write(buffer, old.swapaxes(1, 2), goes_to[..., None], rows)
            return write(buffer, new, place, rows)

        kept = map(moved, (self.key, self.value, self.mass), leaving, coming)
        return H2O(*kept, self.count + 1, recent)

    def attend(self, query) -> Attended:
        return attention(query, self.key, self.value, jnp.int32(0), self._filled()[:, None])

    def extend(self, query, key, value, lengths):
        if lengths is not None:
            return self.prefill(query, key, value, lengths)
        kept = self.append(key, value)
        attended = kept.attend(query)
        gained = mass(query, kept.key, attended.lse, jnp.int32(0), kept._filled()[:, None])
        return attended, dataclasses.replace(kept, mass=kept.mass + gained[..., None])

    def _filled(self) -> jax.Array:
        return jnp.minimum(self.count, self.key.shape[2])
