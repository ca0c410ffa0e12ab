"""Meshes from text such as "2x2", and where each parameter and cache lives on them.

A mesh is data x tensor. `data` divides the rows of a batch; `tensor` divides attention heads, the
feed-forward width, the embedding and the head (Shoeybi et al. 2019, Megatron-LM). What a tensor
axis does not divide evenly is held whole by every device, and the placement says so in words.
"""

from __future__ import annotations

import contextlib
import dataclasses
import re
from collections.abc import Mapping, Sequence
from typing import Any

import jax
from jax.sharding import AxisType, Mesh, NamedSharding, Sharding
from jax.sharding import PartitionSpec as P

from combkv_jax.config import LlamaConfig
from combkv_jax.console import note
from combkv_jax.errors import RequestError
from combkv_jax.layers import Declaration

AXES = ("data", "tensor")
MOST_VIRTUAL = 64  # CPU devices a mesh may invent


def mesh_shape(text: str) -> tuple[int, int]:
    """(data, tensor) from "2x4". Raises RequestError for anything else."""
    match = re.fullmatch(r"(\d{1,6})x(\d{1,6})", text.strip(), re.ASCII)
    if not match:
        raise RequestError(
            f"mesh {text!r} cannot be read; give data x tensor, such as 1x1, 1x2 or 2x2."
        )
    data, tensor = int(match[1]), int(match[2])
    if data < 1 or tensor < 1:
        raise RequestError(f"mesh {text!r} has an axis of 0 devices; both need at least 1.")
    return data, tensor


def parse_mesh(text: str) -> Mesh:
    """The mesh for "2x2" (data x tensor).

    On a CPU with fewer devices virtual ones are made, and stderr says so; JAX allows that only
    before the first use of a device, so call this early. Raises RequestError for text that cannot
    be read and for more devices than there are.
    """
    shape = mesh_shape(text)
    need = shape[0] * shape[1]
    # Harmless where a GPU is found: it counts CPU devices only. RuntimeError: JAX has started.
    with contextlib.suppress(RuntimeError):
        if jax.config.jax_num_cpu_devices < need <= MOST_VIRTUAL:
            jax.config.update("jax_num_cpu_devices", need)
    devices = jax.devices()
    kind = devices[0].platform
    if len(devices) < need:
        fitting = f"; there {'is' if len(devices) == 1 else 'are'} {len(devices)} ({kind})"
        raise RequestError(f"mesh {text!r} asks for {need} devices{fitting}.")
    mesh = jax.make_mesh(shape, AXES, axis_types=(AxisType.Auto,) * 2, devices=devices[:need])
    if kind == "cpu" and need > 1:
        note(f"Mesh {text}: {need} virtual devices of one CPU, for trying it out; no faster.")
    return mesh


@dataclasses.dataclass(frozen=True)
class Placement:
    """Where a model's arrays live on `mesh`.

    split: the logical axes (layers.Declaration.axes) that the tensor axis divides.
    notes: what it does not divide, one sentence each.
    """

    mesh: Mesh
    split: frozenset[str]
    notes: tuple[str, ...]

    def sharding(self, axes: Sequence[str | None]) -> NamedSharding:
        """The sharding of an array whose dimensions have these logical axes."""
        names = ("tensor" if axis in self.split else None for axis in axes)
        return NamedSharding(self.mesh, P(*names))

    def parameters(self, declarations: Mapping[str, Declaration]) -> dict[str, NamedSharding]:
        """The sharding of each declared parameter."""
        return {name: self.sharding(d.axes) for name, d in declarations.items()}

    def cache(self, cache: Any) -> Any:
        """A tree like `cache` of shardings: K/V [B, K, S, D] by rows and KV heads, the rest whole.

        A source shared by all rows ([1, K, S, D] in a larger batch) is divided by heads alone.
        Raises RequestError when the data axis does not divide the batch.
        """
        leaves = jax.tree.leaves(cache)
        batch = max((leaf.shape[0] for leaf in leaves if leaf.ndim == 4), default=1)
        data = self.mesh.shape["data"]
        if batch > 1 and batch % data:
            raise RequestError(
                f"a batch of {batch} cannot be divided over a data axis of {data}; "
                f"{_listed(_divisors(batch))} would divide it."
            )
        heads = "tensor" if "kv_heads" in self.split else None

        def place(leaf) -> NamedSharding:
            if leaf.ndim != 4:
                return NamedSharding(self.mesh, P())
            # An axis of one device is not named: steps return caches without it.
            rows = "data" if data > 1 and leaf.shape[0] == batch > 1 else None
            return NamedSharding(self.mesh, P(rows, heads))

        return jax.tree.map(place, cache)


def place(config: LlamaConfig, mesh: Mesh) -> Placement:
    """The placement of a model on a mesh with axes `data` and `tensor`.

    Raises RequestError when the tensor axis divides nothing at all.
    """
    tensor = mesh.shape["tensor"]
    counts = {
        "heads": (config.num_attention_heads, "attention heads"),
        "kv_heads": (config.num_key_value_heads, "KV heads"),
        "ffn": (config.intermediate_size, "feed-forward columns"),
        # The embedding: divided by vocabulary, looking up one token would gather the whole table.
        "hidden": (config.hidden_size, "hidden columns"),
    }
    if not config.tie_word_embeddings:
        counts["vocab"] = (config.vocab_size, "vocabulary entries")
    split = frozenset(axis for axis, (count, _) in counts.items() if count % tensor == 0)
    if not split:
        numbers = ", ".join(f"{count} {name}" for count, name in counts.values())
        raise RequestError(f"a tensor axis of {tensor} divides none of {numbers}.")
    notes = tuple(
        f"A tensor axis of {tensor} does not divide the {count} {name}, so every device holds "
        f"them all; {_listed(_divisors(count))} would."
        for axis, (count, name) in counts.items()
        if axis not in split
    )
    return Placement(mesh, split, notes)


def _divisors(count: int, most: int = MOST_VIRTUAL) -> list[int]:
    return [n for n in range(1, min(count, most) + 1) if count % n == 0]


def _listed(numbers: Sequence[int]) -> str:
    *head, last = map(str, numbers)
    return f"{', '.join(head)} or {last}" if head else last


def cache_places(model: Any, batch: int) -> tuple[Sharding | None, Sharding | None]:
    """Where a cache for `batch` rows of a CombLlama belongs, by where its weights are: the
    shardings of K/V [B, K, S, D] and of what is small. None: anywhere (weights that are no arrays).
    """
    weight = model.decoder.embed_tokens.weight[...]
    if isinstance(weight, jax.core.Tracer) or not isinstance(weight, jax.Array):
        return None, None
    if not isinstance(weight.sharding, NamedSharding):
        return weight.sharding, weight.sharding
    placement = place(model.config.text, weight.sharding.mesh)
    keys = jax.ShapeDtypeStruct((batch, 1, 1, 1), weight.dtype)
    return placement.cache(keys), NamedSharding(placement.mesh, P())
