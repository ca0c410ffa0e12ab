"""What every cache policy is: a value with one entry a layer, passed in and returned."""

from __future__ import annotations

import dataclasses
import numbers
from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar, Self

import jax
import jax.numpy as jnp

from combkv_jax.attention import Attended
from combkv_jax.config import LlamaConfig
from combkv_jax.errors import RequestError


class LayerCache:
    """One layer's cache of recent tokens, an immutable pytree. Keys are stored after rotary.

    A policy implements `create`, `prefill`, `append` and `attend`. Rows are ragged: each has its
    own count of tokens, and the `lengths` of a prefill say how many of the T new ones are real.

    defaults: the policy's options. sizes: those that say how many of a layer's tokens a decoded
    query sees; beside: those of tokens that it sees whatever `sizes` are; unit: that of the tokens
    that are only seen together. What keeps all tokens and shows them has no sizes.
    """

    defaults: ClassVar[Mapping[str, Any]] = {}
    sizes: ClassVar[tuple[str, ...]] = ()
    beside: ClassVar[tuple[str, ...]] = ()
    unit: ClassVar[str | None] = None
    in_tokens: ClassVar[bool] = True  # what `sized` counts

    @classmethod
    def sized(cls, size: int, given: Mapping[str, Any]) -> dict[str, Any]:
        """The options `given`, and with them those sizes with which a decoded query sees `size`
        tokens of a layer, or as many fewer as make whole units: shared out in equal parts. Where
        `size` is too small for the policy, its `create` refuses them."""
        options = {**cls.defaults, **given}
        free = [name for name in cls.sizes if name not in given]
        fixed = [*cls.beside, *(name for name in cls.sizes if name in given)]
        left = size - sum(options[name] for name in fixed)
        unit = options[cls.unit] if cls.unit else 1
        shares = {}
        for parts, name in zip(range(len(free), 0, -1), free, strict=True):
            shares[name] = left // parts // unit * unit
            left -= shares[name]
        return {**given, **shares}

    @property
    def fetched(self) -> int:
        """Bytes of keys and values that a decoded query brings from the host, at most."""
        return 0

    @classmethod
    def create(cls, shape: CacheShape) -> Self:
        """An empty entry."""
        raise NotImplementedError

    def prefill(
        self, query: jax.Array, key: jax.Array, value: jax.Array, lengths: jax.Array
    ) -> tuple[Attended, Self]:
        """T new tokens a row: query [B, T, H, D], key and value [B, T, K, D], of which the first
        `lengths` [B] are real. They attend causally to everything so far and are kept."""
        raise NotImplementedError

    def append(self, key: jax.Array, value: jax.Array) -> Self:
        """Keeps one more token a row: key, value [B, 1, K, D]."""
        raise NotImplementedError

    def attend(self, query: jax.Array) -> Attended:
        """The newest token's query [B, 1, H, D] over everything kept."""
        raise NotImplementedError

    def extend(
        self, query: jax.Array, key: jax.Array, value: jax.Array, lengths: jax.Array | None
    ) -> tuple[Attended, Self]:
        """`prefill`, or, where lengths is None, one decoded token a row: `append` and `attend`.
        What a policy learns from queries it learns here, not in `append` or `attend` alone."""
        if lengths is not None:
            return self.prefill(query, key, value, lengths)
        entry = self.append(key, value)
        return entry.attend(query), entry

    def expect(self, query: Callable[[], jax.Array]) -> Self:
        """Before a decoded token comes to this layer: `query` gives about what its query
        [B, 1, H, D] will be, so that what it reads can be on the way. `extend` must follow."""
        return self

    def nbytes(self) -> dict[str, int]:
        """Bytes by place, {"device", "host"}."""
        return nbytes(self)


@dataclasses.dataclass(frozen=True)
class CacheShape:
    """What a policy needs to make an empty entry.

    capacity: most recent tokens a row will hold; policies that drop tokens hold less.
    rotary: angle per position of each rotary pair [D / 2], for policies that move positions.
    options: the policy's own settings.
    keys, small: where K/V and the counters live (None: the default device). A cache must begin
        where a step leaves it, or the second step compiles anew.
    group: query heads that share a KV head, for policies that keep queries.
    layer, layers: which layer of how many, for policies that treat them differently.
    """

    batch: int
    kv_heads: int
    head_dim: int
    capacity: int
    dtype: Any
    rotary: jax.Array
    options: dict[str, Any] = dataclasses.field(default_factory=dict)
    keys: jax.sharding.Sharding | None = None
    small: jax.sharding.Sharding | None = None
    group: int = 1
    layer: int = 0
    layers: int = 1

    def empty(
        self, tokens: int, dim: int | None = None, dtype: Any = None, fill: float = 0
    ) -> jax.Array:
        """Zeros (or `fill`) for `tokens` keys or values, [B, K, tokens, dim]: heads outside tokens,
        so that a head's keys are one matrix and no product needs a transposed copy. What else is
        kept for each token or group of them has the same four dimensions, and lives beside it."""
        dim = self.head_dim if dim is None else dim
        shape = (self.batch, self.kv_heads, tokens, dim)
        return jnp.full(shape, fill, dtype or self.dtype, device=self.keys)

    def counter(self) -> jax.Array:
        """A count for each row, int32 [B], at zero."""
        return jnp.zeros(self.batch, jnp.int32, device=self.small)

    def settings(
        self, policy: str, *, least: Mapping[str, int] | None = None, **defaults: Any
    ) -> tuple[Any, ...]:
        """The policy's options in the order of `defaults`, which stand for those not given: whole
        numbers of at least 1 (or what `least` says), or, where the default is a tuple, numbers of
        layers.

        Raises RequestError for an option the policy has not, and for one that is nothing of that
        kind.
        """
        for name, value in self.options.items():
            if name not in defaults:
                known = ", ".join(defaults)
                raise RequestError(f"the {policy} cache has no option {name!r}; it takes {known}.")
            if isinstance(defaults[name], tuple):
                self._check_layers(f"{name} of the {policy} cache", value)
            elif not _is_whole(value) or value < (least or {}).get(name, 1):
                raise RequestError(
                    f"{name} of the {policy} cache is {value!r}; it must be a whole number of at "
                    f"least {(least or {}).get(name, 1)}."
                )
        return tuple(
            tuple(map(int, value)) if isinstance(value, Sequence) else int(value)
            for value in (self.options.get(name, default) for name, default in defaults.items())
        )

    def _check_layers(self, name: str, value: Any) -> None:
        is_list = isinstance(value, Sequence) and all(map(_is_whole, value))
        if not is_list or not all(0 <= layer < self.layers for layer in value):
            raise RequestError(
                f"{name} is {value!r}; it must be a list of layers, each from 0 to "
                f"{self.layers - 1}."
            )


def _is_whole(value: Any) -> bool:
    return isinstance(value, numbers.Integral) and not isinstance(value, bool)


def newest(count: jax.Array, slots: int) -> jax.Array:
    """The token that each slot of a ring holds after `count` [B] tokens, where token i lies in slot
    i mod `slots`: int32 [B, slots], negative where there is none yet."""
    last = count[:, None] - 1
    return last - (last - jnp.arange(slots)) % slots


def line_up(kept: jax.Array, new: jax.Array, slot: jax.Array, filled: jax.Array) -> jax.Array:
    """One line of tokens without a gap: kept [B, K, S, D] at slots `slot` [B or 1, S + T], of which
    the first `filled` [B] count, and right behind them new [B, T, K, D]. [B, K, S + T, D]"""
    both = jnp.concatenate([kept, new.swapaxes(1, 2).astype(kept.dtype)], axis=2)
    place = jnp.arange(both.shape[2])
    behind = kept.shape[2] + place - filled[:, None]
    return take(both, jnp.where(place < filled[:, None], slot, behind))


def take(tokens: jax.Array, index: jax.Array) -> jax.Array:
    """tokens [B, K, S, D] at index [B, N] (for all heads) or [B, K, N]: [B, K, N, D]. An index
    past an end takes what lies there."""
    index = index[:, None] if index.ndim == 2 else index
    index = jnp.clip(index, 0, tokens.shape[2] - 1)
    return jnp.take_along_axis(tokens, index[..., None], axis=2)


def write(buffer: jax.Array, new: jax.Array, index: jax.Array, rows: jax.Array) -> jax.Array:
    """Puts new [b, T, K, D] into buffer [B, K, S, D] in place (when donated).

    index: [b, T], or [b, K, T] for each head its own: where each token goes; S or more drops it.
    rows: [b], the row of each.
    """
    heads = jnp.arange(buffer.shape[1])
    index = index[:, None, :] if index.ndim == 2 else index
    # Scatter over the leading dimensions in order, so that nothing transposes the buffer.
    place = (rows[:, None, None], heads[None, :, None], index)
    return buffer.at[place].set(
        new.swapaxes(1, 2).astype(buffer.dtype), mode="drop", unique_indices=True
    )


def full_cache_bytes(config: LlamaConfig, tokens: int, dtype: Any) -> int:
    """Bytes of the K/V of all layers for `tokens` tokens: what is compared with."""
    heads = config.num_hidden_layers * config.num_key_value_heads
    return 2 * heads * config.head_dim * tokens * jnp.dtype(dtype).itemsize


def nbytes(tree: Any) -> dict[str, int]:
    """Bytes of a cache's arrays by place, live ones or such as are traced (which take no memory):
    {"device", "host"}."""
    total = {"device": 0, "host": 0}
    for leaf in jax.tree.leaves(tree):
        if isinstance(leaf, jax.Array):
            kind = jax.typeof(leaf)
            place = "host" if kind.memory_space == jax.memory.Space.Host else "device"
            total[place] += kind.size * kind.dtype.itemsize
    return total
