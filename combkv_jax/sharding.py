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
import numpy as np
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


def parse_mesh(text: str | None, processes: int = 1) -> Mesh:
    """The mesh for "2x2" (data x tensor); for None all devices along `data`.

    On a CPU with fewer devices virtual ones are made, and stderr says so; JAX allows that only
    before the first use of a device, so call this early. processes: what `distributed.start`
    returned; each gives the same number of its devices, so that rows stay with a process where
    they can. Raises RequestError for text that cannot be read and for more devices than there are.
    """
    if text is None:
        text = f"{len(jax.devices())}x1"
    shape = mesh_shape(text)
    need = shape[0] * shape[1]
    if need % processes:
        raise RequestError(
            f"mesh {text!r} has {need} devices, which {processes} processes cannot share evenly; "
            f"its size must be a multiple of {processes}."
        )
    share = need // processes
    # Harmless where a GPU is found: it counts CPU devices only. RuntimeError: JAX has started.
    with contextlib.suppress(RuntimeError):
        if jax.config.jax_num_cpu_devices < share <= MOST_VIRTUAL:
            jax.config.update("jax_num_cpu_devices", share)
    devices = jax.devices()
    kind = devices[0].platform
    held = [[d for d in devices if d.process_index == i] for i in range(processes)]
    if min(map(len, held)) < share:
        fitting = f"; there {'is' if len(devices) == 1 else 'are'} {len(devices)} ({kind})"
        if processes > 1:
            fitting += f", {' and '.join(str(len(own)) for own in held)} of them in a process"
        raise RequestError(f"mesh {text!r} asks for {need} devices{fitting}.")
    chosen = [device for own in held for device in own[:share]]
    mesh = jax.make_mesh(shape, AXES, axis_types=(AxisType.Auto,) * 2, devices=chosen)
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

    def moments(self, declarations: Mapping[str, Declaration]) -> dict[str, NamedSharding]:
        """Where each parameter's optimiser state lives: as the parameter, and its largest dimension
        that the tensor axis leaves whole divided over `data`, where that can be (ZeRO stage 1,
        Rajbhandari et al. 2020)."""
        return {name: self._over_data(d) for name, d in declarations.items()}

    def _over_data(self, declared: Declaration) -> NamedSharding:
        data = self.mesh.shape["data"]
        names = list(self.sharding(declared.axes).spec)
        sizes = [
            size if name is None and size % data == 0 else 0
            for name, size in zip(names, declared.shape, strict=True)
        ]
        if data > 1 and max(sizes, default=0):
            names[sizes.index(max(sizes))] = "data"
        return NamedSharding(self.mesh, P(*names))

    def check_rows(self, rows: int, named: str) -> None:
        """Raises RequestError when the data axis does not divide these rows."""
        data = self.mesh.shape["data"]
        if rows % data:
            raise RequestError(
                f"{named} cannot be divided over a data axis of {data}; "
                f"{_listed(_divisors(rows))} would divide it."
            )

    def cache(self, cache: Any) -> Any:
        """A tree like `cache` of shardings: K/V [B, K, S, D] by rows and KV heads, the rest whole.

        A source shared by all rows ([1, K, S, D] in a larger batch) is divided by heads alone.
        Raises RequestError when the data axis does not divide the batch.
        """
        leaves = jax.tree.leaves(cache)
        batch = max((leaf.shape[0] for leaf in leaves if leaf.ndim == 4), default=1)
        data = self.mesh.shape["data"]
        if batch > 1:
            self.check_rows(batch, f"a batch of {batch}")
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


def put(array: np.ndarray, where: Sharding) -> jax.Array:
    """An array that every process has onto the devices: each process feeds its own part."""
    return jax.make_array_from_callback(array.shape, where, lambda index: array[index])


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
