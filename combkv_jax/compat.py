"""What JAX has no public name for. Checked with jax 0.10.2 to 0.12; nothing else may import it."""

from __future__ import annotations

import jax


def cudnn_attention(
    query: jax.Array, key: jax.Array, value: jax.Array, mask: jax.Array, scale: float
) -> tuple[jax.Array, jax.Array]:
    """cuDNN's attention, query [B, H, T, D], key and value [B, K, S, D], mask bool [B, 1, T, S]:
    out [B, H, T, D] and the log-sum-exp, float32 [B, H, T].

    `jax.nn.dot_product_attention` rounds that to the dtype of the output, too coarse to merge by,
    and takes keys in another order, which would copy them all.
    """
    from jax._src.cudnn import fused_attention_stablehlo as fused

    return fused.dot_product_attention(
        query, key, value, mask=mask, scale=scale, qkv_layout="BNTH", return_residual=True
    )
