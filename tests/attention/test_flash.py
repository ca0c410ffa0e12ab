"""The Hopper kernel: run in Pallas' interpreter, which finds races, and compiled for an H200."""

from __future__ import annotations

import importlib.util
import re
import shutil
import subprocess
from pathlib import Path

import jax
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import (
    AbstractDevice,
    AbstractMesh,
    NamedSharding,
    PartitionSpec,
    use_abstract_mesh,
)

from combkv_jax import planner
from combkv_jax.attention import flash
from tests.attention.cases import CASES, expected
from tests.test_planner import needs_compiler

needs_interpreter = pytest.mark.skipif(
    not hasattr(plgpu, "force_gpu_interpret_mode"),
    reason=f"jax {jax.__version__} has no public interpreter of GPU kernels; 0.11 has",
)


def on(gpu: str):
    """A context in which the device is that GPU: a name of the planner's table, or any kind."""
    kind = planner.GPUS[gpu].device if gpu in planner.GPUS else gpu
    device = AbstractDevice(kind, num_cores=132, platform="gpu")
    return use_abstract_mesh(AbstractMesh((), (), abstract_device=device))


def interpreted(function, *arrays):
    """What the kernels in it compute, on the CPU, with every access to memory watched."""
    params = plgpu.InterpretGPUParams(detect_races=True)
    with plgpu.force_gpu_interpret_mode(params), on("h100"):
        return jax.block_until_ready(jax.jit(function)(*arrays))


def abstract(query, key):
    """The arguments of attention for a query and a key of these shapes, on an H200 that is not
    there."""
    where = NamedSharding(planner.gpu_mesh("h200"), PartitionSpec())

    def array(shape, dtype):
        return jax.ShapeDtypeStruct(shape, dtype, sharding=where)

    query, key = (array(shape, jnp.bfloat16) for shape in (query, key))
    bound = array(query.shape[:2], jnp.int32)
    return query, key, key, bound, bound


@needs_interpreter
@pytest.mark.parametrize("case", CASES, ids=str)
def test_against_a_plain_softmax(case, capfd):
    arrays = case.draw()
    got = interpreted(lambda *a: flash.attention(*a, splits=case.splits), *arrays)
    out, lse = expected(*arrays)
    np.testing.assert_allclose(np.asarray(got[0], np.float32), out, atol=0.02, rtol=0.01)
    np.testing.assert_allclose(got[1], lse, atol=1e-4)
    assert "RACE DETECTED" not in "".join(capfd.readouterr())


def ptxas(text: str, folder: Path) -> str:
    """What `ptxas -v` says of the kernels in a dump of PTX."""
    found = importlib.util.find_spec("nvidia")
    paths = [Path(p) / "cuda_nvcc/bin" for p in found.submodule_search_locations] if found else []
    programs = [shutil.which("ptxas", path=p) for p in (*paths, None)]
    said = ""
    for i, part in enumerate(re.findall(r"^\.version.*?^}$", text, re.DOTALL | re.MULTILINE)):
        (folder / f"{i}.ptx").write_text(part + "\n")
        for program in filter(None, programs):  # one may be older than the PTX
            command = [program, "-arch=sm_90a", "-v", f"{folder}/{i}.ptx", "-o", f"{folder}/out"]
            ran = subprocess.run(command, capture_output=True, text=True)
            if not ran.returncode:
                break
        else:
            pytest.skip("no ptxas that reads this PTX was found")
        said += ran.stderr
    return said


@needs_interpreter
@needs_compiler
@pytest.mark.parametrize("queries", [1, 512])
def test_compiled_for_llama_8b_on_an_h200(queries, monkeypatch, capfd, tmp_path):
    """Compiling fails where the shared memory does not suffice."""
    monkeypatch.setenv("MOSAIC_GPU_DUMP_PTX", "1")
    arrays = abstract((1, queries, 32, 128), (1, 8, 131072, 128))
    used = jax.jit(flash.attention).lower(*arrays).compile().memory_analysis()
    # Keys and values are read where they lie: beside them there are the parts of the result.
    assert used.temp_size_in_bytes < 0.02 * 2 * arrays[1].size * 2
    ptx = capfd.readouterr().out
    assert "wgmma.mma_async" in ptx
    said = ptxas(ptx, tmp_path)
    assert "Used" in said
    assert re.findall(r"(\d+) bytes spill", said) == ["0", "0"]
    assert "serialized" not in said


@needs_interpreter
@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"dtype": jnp.float32}, "not float32"),
        ({"dim": 96}, "head_dim is 96"),
        ({"keys": 130}, "130 keys"),
        ({"keys": 56}, "56 keys"),
    ],
)
def test_what_it_does_not_take(change, reason):
    size = {"dtype": jnp.bfloat16, "dim": 64, "keys": 128} | change
    query = jnp.zeros((1, 1, 2, size["dim"]), size["dtype"])
    key = jnp.zeros((1, 1, size["keys"], size["dim"]), size["dtype"])
    with pytest.raises(NotImplementedError, match=reason):
        flash.check(query, key, key)
