"""Building blocks of a Llama layer: declared parameters, RMSNorm, rotary embedding, SwiGLU.

Weights keep the checkpoint's layout, `[out, in]`, so that a tensor goes from file to device as it
is. Norms, rotary angles and softmax are computed in float32 whatever the weights' dtype.
"""

from __future__ import annotations

import dataclasses
import math

import jax
import jax.numpy as jnp
from flax import nnx

from combkv_jax.config import LlamaConfig


@dataclasses.dataclass(frozen=True)
class Declaration:
    """One parameter before it exists: initialisation, sharding and loading all follow from it.

    axes: a logical axis name for each dimension; `sharding.py` maps names to mesh axes.
    init: "normal" (std `hidden ** -0.5`, by the last dimension), "ones" or "zeros".
    dtype: None for the model's own dtype.
    """

    shape: tuple[int, ...]
    axes: tuple[str | None, ...]
    init: str = "normal"
    dtype: str | None = None

    def create(self, key: jax.Array, dtype: jnp.dtype) -> jax.Array:
        """A fresh array of this declaration."""
        dtype = self.dtype or dtype
        if self.init == "normal":
            scale = self.shape[-1] ** -0.5
            return (scale * jax.random.normal(key, self.shape, jnp.float32)).astype(dtype)
        return {"ones": jnp.ones, "zeros": jnp.zeros}[self.init](self.shape, dtype)


def declare(shape, axes, init="normal", dtype=None) -> nnx.Param:
    """A module attribute that holds a Declaration until `model.build` puts an array there."""
    return nnx.Param(Declaration(tuple(shape), tuple(axes), init, dtype))


class Linear(nnx.Module):
    """A projection without bias, weight [out, in]."""

    def __init__(self, inputs: int, outputs: int, axes: tuple[str | None, str | None]):
        self.weight = declare((outputs, inputs), axes)

    def __call__(self, x: jax.Array) -> jax.Array:  # [..., in] -> [..., out]
        return jax.lax.dot_general(x, self.weight[...], (((x.ndim - 1,), (1,)), ((), ())))


class HeadsLinear(nnx.Module):
    """A projection of each head within itself, weight [heads, out, in]."""

    def __init__(self, heads: int, head_dim: int):
        self.weight = declare((heads, head_dim, head_dim), ("kv_heads", None, None))

    def __call__(self, x: jax.Array) -> jax.Array:  # [B, T, heads, head_dim], the same shape
        return jnp.einsum("bthi,hoi->btho", x, self.weight[...])


def unit_rms(x: jax.Array, eps: float) -> jax.Array:
    """x [..., D] with a root mean square of one over the last axis."""
    x32 = x.astype(jnp.float32)
    x32 *= jax.lax.rsqrt(jnp.mean(jnp.square(x32), axis=-1, keepdims=True) + eps)
    return x32.astype(x.dtype)


class RMSNorm(nnx.Module):
    """Root-mean-square norm over the last axis (Zhang & Sennrich 2019), in float32."""

    def __init__(self, size: int, eps: float):
        self.weight = declare((size,), (None,), "ones")
        self.eps = eps

    def __call__(self, x: jax.Array) -> jax.Array:  # [..., size]
        return unit_rms(x, self.eps) * self.weight[...]


class MLP(nnx.Module):
    """SwiGLU feed-forward block (Shazeer 2020)."""

    def __init__(self, config: LlamaConfig):
        hidden, inner = config.hidden_size, config.intermediate_size
        self.gate_proj = Linear(hidden, inner, ("ffn", None))
        self.up_proj = Linear(hidden, inner, ("ffn", None))
        self.down_proj = Linear(inner, hidden, (None, "ffn"))

    def __call__(self, x: jax.Array) -> jax.Array:  # [..., D] -> [..., D]
        return self.down_proj(jax.nn.silu(self.gate_proj(x)) * self.up_proj(x))


def project_heads(linear: Linear, x: jax.Array, head_dim: int) -> jax.Array:
    """`linear(x)` cut into heads: [B, T, D] -> [B, T, heads, head_dim]."""
    y = linear(x)
    return y.reshape(*y.shape[:-1], y.shape[-1] // head_dim, head_dim)


def rotary_frequencies(config: LlamaConfig) -> jax.Array:
    """Angle per position of each rotary pair, float32 [head_dim / 2], with llama3 scaling if any.

    Source: Llama 3.1's scaling as documented in transformers (`rope_type="llama3"`): wavelengths
    over `original / low_freq_factor` are stretched by `factor`, those under
    `original / high_freq_factor` stay, and the ones between are interpolated.
    """
    half = jnp.arange(0, config.head_dim, 2, dtype=jnp.float32) / config.head_dim
    frequency = 1.0 / config.rope_theta**half
    scaling = config.rope_scaling
    if scaling is None:
        return frequency
    wavelength = 2 * math.pi / frequency
    low, high = scaling.low_freq_factor, scaling.high_freq_factor
    smooth = (scaling.original_max_position_embeddings / wavelength - low) / (high - low)
    smooth = jnp.clip(smooth, 0.0, 1.0)
    return (1 - smooth) * frequency / scaling.factor + smooth * frequency


def rotary_angles(config: LlamaConfig, positions: jax.Array) -> tuple[jax.Array, jax.Array]:
    """cos and sin for `rotate`, float32 [B, T, head_dim / 2], from positions [B, T]."""
    angle = positions.astype(jnp.float32)[..., None] * rotary_frequencies(config)
    return jnp.cos(angle), jnp.sin(angle)


def rotate(x: jax.Array, angles: tuple[jax.Array, jax.Array]) -> jax.Array:
    """Rotary embedding of x [B, T, heads, head_dim] (Su et al. 2021), by halves."""
    cos, sin = (a[:, :, None, :] for a in angles)
    first, second = jnp.split(x.astype(jnp.float32), 2, axis=-1)
    out = jnp.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1)
    return out.astype(x.dtype)
