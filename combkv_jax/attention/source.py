"""Where attention reads keys and values from: an array, or something that decodes to one."""

from __future__ import annotations

from typing import Any, Protocol

import jax
import jax.numpy as jnp


class Coded(Protocol):
    """Keys or values [B, K, S, D] held in fewer bits, a pytree whose arrays begin with [B, K].

    group: tokens coded together; what is decoded begins and ends with whole groups.
    dtype: what they decode to.
    """

    group: int
    dtype: Any

    @property
    def shape(self) -> tuple[int, int, int, int]: ...

    def dequantize(self, first: jax.Array | int, tokens: int) -> jax.Array:
        """[B, K, tokens, D] from token `first`."""
        ...


Source = jax.Array | Coded


def is_coded(source: Source) -> bool:
    """Whether it must be decoded before it is read."""
    return hasattr(source, "dequantize")


def read(source: Source, first: jax.Array | int, tokens: int) -> jax.Array:
    """[B, K, tokens, D] of [B, K, S, D] from token `first`."""
    if is_coded(source):
        return source.dequantize(first, tokens)
    return jax.lax.dynamic_slice_in_dim(source, first, tokens, axis=2)


def check_arrays(key: Source, value: Source) -> None:
    """Raises NotImplementedError, with the reason, for coded keys or values."""
    if is_coded(key) or is_coded(value):
        raise NotImplementedError("it reads arrays only, not coded keys and values")


def check_16_bit(*arrays: Source) -> None:
    """Raises NotImplementedError, with the reason, for what tensor cores do not multiply as it
    is (coded: as it is decoded)."""
    dtypes = {jnp.dtype(x.dtype) for x in arrays}
    if len(dtypes) > 1 or not dtypes <= {jnp.dtype("bfloat16"), jnp.dtype("float16")}:
        named = ", ".join(sorted(d.name for d in dtypes))
        raise NotImplementedError(f"it multiplies bfloat16 or float16 alone, not {named}")
