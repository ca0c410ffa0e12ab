"""Plans a decode step for a GPU that is not there: XLA compiles it and tells the exact memory.

Nothing is run and no weight is read: the model and its cache are shapes. What XLA's GPU compiler
answers (`memory_analysis`) is what the step needs on the device.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import os
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import topologies
from jax.experimental.compilation_cache import compilation_cache
from jax.sharding import Mesh

from combkv_jax import generate, sharding
from combkv_jax.cache import Chunks, full_cache_bytes
from combkv_jax.config import CombConfig
from combkv_jax.console import GPU_MEMORY_FRACTION
from combkv_jax.errors import RequestError
from combkv_jax.model import CombLlama, abstract, declarations


@dataclasses.dataclass(frozen=True)
class Gpu:
    """A GPU as XLA's compiler sees it.

    capability: CUDA compute capability. cores: streaming multiprocessors; lanes: float32 units in
    each. memory: bytes the driver reports. bandwidth: bytes/s. l2, shared: bytes of cache and of
    shared memory a core; threads: most resident on a core. clock: boost, GHz.
    """

    device: str
    capability: tuple[int, int]
    cores: int
    lanes: int
    memory: int
    bandwidth: float
    l2: int
    shared: int
    threads: int
    clock: float

    def target(self) -> str:
        """The text form of XLA's GpuTargetConfigProto."""
        major, minor = self.capability
        # From Hopper on, the tensor cores' own instructions need the "a" variant (sm_90a).
        extension = " feature_extension: ACCELERATED_FEATURES" if major >= 9 else ""
        return f"""
gpu_device_info {{
  threads_per_block_limit: 1024
  threads_per_warp: 32
  shared_memory_per_block: {48 * KIB}
  shared_memory_per_core: {self.shared}
  shared_memory_per_block_optin: {self.shared - KIB}
  threads_per_core_limit: {self.threads}
  core_count: {self.cores}
  fpus_per_core: {self.lanes}
  block_dim_limit_x: 2147483647
  block_dim_limit_y: 65535
  block_dim_limit_z: 65535
  thread_dim_limit_x: 1024
  thread_dim_limit_y: 1024
  thread_dim_limit_z: 64
  registers_per_core_limit: 65536
  registers_per_block_limit: 65536
  memory_bandwidth: {int(self.bandwidth)}
  device_memory_size: {self.memory}
  l2_cache_size: {self.l2}
  clock_rate_ghz: {self.clock}
  cuda_compute_capability {{ major: {major} minor: {minor}{extension} }}
  device_vendor: "NVIDIA Corporation"
  device_address_bits: 64
  name: "{self.device}"
  driver_version: "12.9.0"
  runtime_version: "12.9.0"
  compile_time_toolkit_version: "12.9.0"
  dnn_version: "9.10.0"
}}
platform_name: "CUDA"
dnn_version_info {{ major: 9 minor: 10 }}
runtime_version {{ major: 12 minor: 9 }}
device_description_str: "{self.device}"
"""


KIB, MIB, GB = 2**10, 2**20, 10**9

# Cores, clocks, bandwidth and L2: NVIDIA's data sheets and architecture white papers (GA102, AD102,
# A100, H100, H200, B200). Shared memory and threads: CUDA C++ Programming Guide, table "Technical
# Specifications per Compute Capability". Memory: what CUDA reports for the device, which is less
# than the data sheet's round number; for the two GeForce cards the least a Linux driver reports.
GPUS = {
    "rtx-3090": Gpu("NVIDIA GeForce RTX 3090", (8, 6), 82, 128, 24200 * MIB, 936 * GB,
                    6 * MIB, 100 * KIB, 1536, 1.695),
    "rtx-4090": Gpu("NVIDIA GeForce RTX 4090", (8, 9), 128, 128, 24200 * MIB, 1008 * GB,
                    72 * MIB, 100 * KIB, 1536, 2.52),
    "a100-40": Gpu("NVIDIA A100-SXM4-40GB", (8, 0), 108, 64, 40339 * MIB, 1555 * GB,
                   40 * MIB, 164 * KIB, 2048, 1.41),
    "a100-80": Gpu("NVIDIA A100-SXM4-80GB", (8, 0), 108, 64, 81157 * MIB, 2039 * GB,
                   40 * MIB, 164 * KIB, 2048, 1.41),
    "h100": Gpu("NVIDIA H100 80GB HBM3", (9, 0), 132, 128, 81008 * MIB, 3350 * GB,
                50 * MIB, 228 * KIB, 2048, 1.98),
    "h200": Gpu("NVIDIA H200", (9, 0), 132, 128, 144384 * MIB, 4800 * GB,
                50 * MIB, 228 * KIB, 2048, 1.98),
    "b200": Gpu("NVIDIA B200", (10, 0), 148, 128, 182642 * MIB, 7700 * GB,
                126 * MIB, 228 * KIB, 2048, 1.965),
}  # fmt: skip


@dataclasses.dataclass(frozen=True)
class Plan:
    """What a decode step takes on each GPU, in bytes.

    weights, cache: all of the model's weights, and the compressed history with the recent tokens.
    arguments: what the step reads: the cache and the weights it uses.
    temporaries, output, alias: scratch memory; results; how much of those stays where the donated
        recent cache was.
    peak: weights (those that only encoding uses too), cache, temporaries and what is not aliased.
    memory: the device's own; fits: whether `peak` is within 95 % of it.
    full_cache: K/V of all layers for the same tokens, on each GPU, for comparison.
    seconds_a_token: the memory bandwidth's lower bound: everything the step reads, once.
    """

    gpu: str
    mesh: str
    weights: int
    cache: int
    arguments: int
    temporaries: int
    output: int
    alias: int
    peak: int
    memory: int
    fits: bool
    full_cache: int
    seconds_a_token: float
    notes: tuple[str, ...]


def find_gpu(name: str) -> Gpu:
    """The GPU of that name. Raises RequestError with the list of names."""
    if name.lower() not in GPUS:
        raise RequestError(f"GPU {name!r} is not known; choose one of {', '.join(GPUS)}.")
    return GPUS[name.lower()]


def gpu_mesh(gpu: str, shape: tuple[int, int] = (1, 1)) -> Mesh:
    """A data x tensor mesh of GPUs that need not be there, to compile for.

    Raises RequestError for an unknown name, and where JAX's CUDA plugin is not installed.
    """
    target = find_gpu(gpu).target()
    # Without a GPU the plugin's version check fails, and then it does not register at all.
    os.environ.setdefault("JAX_SKIP_CUDA_CONSTRAINTS_CHECK", "1")
    # The compiler logs that what does not fit does not fit; the plan says it in words.
    os.environ["TF_CPP_MIN_LOG_LEVEL"] = "3"
    try:
        topology = topologies.get_topology_desc(
            platform="cuda", target_config=target, topology=f"1x{shape[0] * shape[1]}x1"
        )
    except NotImplementedError as error:
        raise RequestError(
            f"planning for GPU {gpu!r} needs JAX's CUDA compiler; on Linux install it with "
            "pip install 'jax[cuda12]' and leave JAX_PLATFORMS unset or at cpu."
        ) from error
    # Its axes are of type Auto, as sharding.parse_mesh makes them.
    return topologies.make_mesh(topology, shape, sharding.AXES)


def plan_decode(
    config: CombConfig,
    gpu: str,
    history: int,
    window: int,
    batch: int = 1,
    dtype: Any = jnp.bfloat16,
    mesh: tuple[int, int] = (1, 1),
) -> Plan:
    """Compiles one decode step behind `history` compressed tokens and `window` recent ones a row.

    mesh: data x tensor. Raises RequestError as `gpu_mesh` and `sharding.place` do, and for a count
    below 1.
    """
    for name, count in (("history", history), ("window", window), ("batch", batch)):
        if count < 1:
            raise RequestError(f"{name} is {count}; a plan needs at least 1.")
    placement = sharding.place(config.text, gpu_mesh(gpu, mesh))
    model = abstract(config, dtype)
    places = placement.parameters(declarations(config)).values()
    model = placed(model, jax.tree.unflatten(jax.tree.structure(model), places))
    inputs = jax.eval_shape(functools.partial(_step_inputs, history, window, batch), model)
    state, borrowed, draw, stop = placed(inputs, placement.cache(inputs))
    with no_compile_cache():
        step = jax.jit(generate.decode, donate_argnames="state")
        used = step.lower(model, state, borrowed, draw, stop).compile().memory_analysis()
    cache = (state.cache, borrowed)
    weights, cached = nbytes(model), nbytes(cache)
    new = used.temp_size_in_bytes + used.output_size_in_bytes - used.alias_size_in_bytes
    peak = weights + cached + new
    # One row of the embedding is read, not the table; a tied head reads it all.
    looked_up = 0 if config.text.tie_word_embeddings else nbytes(model.decoder.embed_tokens)
    chosen = find_gpu(gpu)
    full = full_cache_bytes(config.text, history + window, dtype)
    split = placement.mesh.shape["tensor"] if "kv_heads" in placement.split else 1
    return Plan(
        gpu=chosen.device,
        mesh=f"{mesh[0]}x{mesh[1]}",
        weights=weights,
        cache=cached,
        arguments=used.argument_size_in_bytes,
        temporaries=used.temp_size_in_bytes,
        output=used.output_size_in_bytes,
        alias=used.alias_size_in_bytes,
        peak=peak,
        memory=chosen.memory,
        fits=peak <= GPU_MEMORY_FRACTION * chosen.memory,
        full_cache=full * batch // mesh[0] // split,
        seconds_a_token=(used.argument_size_in_bytes - looked_up) / chosen.bandwidth,
        notes=placement.notes,
    )


def _step_inputs(history: int, window: int, batch: int, model: CombLlama) -> tuple:
    """What `generate.decode` takes besides the model, with every slot of the cache taken."""
    config = model.config

    def chunks(tokens: int) -> Chunks:
        shape = (batch, config.text.num_key_value_heads, tokens, config.text.head_dim)
        empty, end = jnp.zeros(shape, model.dtype), jnp.full((batch, 1), tokens, jnp.int32)
        return Chunks(empty, empty, jnp.zeros_like(end), end)

    sinks = 0 if config.is_original else config.sink_tokens
    past = model.make_history(
        [chunks(history) for _ in config.cross_layers],
        {i: chunks(sinks) for i in range(config.text.num_hidden_layers)} if sinks else {},
        jnp.full(batch, history, jnp.int32),
    )
    cache = generate.new_cache(model, window, past if config.cross_layers else None, batch=batch)
    changed, borrowed = cache.split()
    tokens, none = jnp.zeros(batch, jnp.int32), jnp.zeros(batch, bool)
    state = generate.SamplingState(changed, tokens, none, jnp.int32(0), jax.random.key(0))
    return state, borrowed, generate.Draw.of(generate.Sampling()), jnp.zeros(1, jnp.int32)


def placed(tree: Any, places: Any) -> Any:
    """A tree of abstract arrays, each at its place."""

    def place(leaf, where):
        return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=where)

    return jax.tree.map(place, tree, places)


def nbytes(tree: Any) -> int:
    """Bytes of abstract arrays on each device of their mesh."""
    leaves = jax.tree.leaves(tree)
    return sum(int(np.prod(x.sharding.shard_shape(x.shape))) * x.dtype.itemsize for x in leaves)


@contextlib.contextmanager
def no_compile_cache() -> Iterator[None]:
    """JAX cannot read back a program for a device that is not there, and warns when it tries."""
    before = jax.config.jax_enable_compilation_cache
    jax.config.update("jax_enable_compilation_cache", False)
    compilation_cache.reset_cache()  # the setting is looked at once
    try:
        yield
    finally:
        jax.config.update("jax_enable_compilation_cache", before)
        compilation_cache.reset_cache()
