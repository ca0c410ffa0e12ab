"""What tells the model that a run begins from: its weights, by a sample of each tensor."""

from __future__ import annotations

import hashlib

import jax
import jax.numpy as jnp
import numpy as np

from combkv_jax import distributed
from combkv_jax.errors import RequestError
from combkv_jax.training.step import Arrays

SAMPLE = 16  # numbers of each tensor; other weights differ in all of them


def identity(arrays: Arrays) -> str:
    """The same for the same weights in the same dtype, on any mesh. Raises RequestError, naming
    tensors, for weights that are no finite numbers: nothing can be learnt from those."""
    names = sorted(arrays)
    finite, samples = distributed.fetch(_look([arrays[name] for name in names]))
    spoilt = [name for name, fine in zip(names, finite, strict=True) if not fine]
    if spoilt:
        more = f" and {len(spoilt) - 1} more" if len(spoilt) > 1 else ""
        raise RequestError(
            f"the model's weights are not all finite numbers ({spoilt[0]}{more}); convert it anew."
        )
    digest = hashlib.sha256()
    for name, sample in zip(names, samples, strict=True):
        digest.update(f"{name} {arrays[name].shape} {arrays[name].dtype}".encode())
        digest.update(np.asarray(sample, np.float32).tobytes())
    return digest.hexdigest()[:16]


@jax.jit
def _look(arrays: list[jax.Array]) -> tuple[list[jax.Array], list[jax.Array]]:
    finite = [jnp.all(jnp.isfinite(x)) for x in arrays]
    return finite, [x[(0,) * (x.ndim - 1)][:SAMPLE] for x in arrays]
