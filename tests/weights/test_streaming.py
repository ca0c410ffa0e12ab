"""Memory: a conversion never holds a model, only a layer of it."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.once

ROOT = Path(__file__).parents[2]

_WRITE = """
import sys
from pathlib import Path
from benchmarks.synthetic_llama import scaled, write

write(Path(sys.argv[1], "nothing"), scaled(10000), seed=0)
write(Path(sys.argv[1], "big"), scaled(50), seed=0)
"""

# The peak of a process only grows, so a conversion of next to nothing comes first: what it leaves
# (interpreter, jax, orbax and its threads) is not the model's.
_CONVERT = """
import sys
from pathlib import Path
from combkv_jax import weights
from combkv_jax.console import peak_memory

folder, action = Path(sys.argv[1]), sys.argv[2]
for name in ("nothing", "big"):
    if action == "convert":
        weights.convert(folder / name, folder / f"{name}-native")
    else:
        weights.export(folder / f"{name}-native", folder / f"{name}-back")
    print(peak_memory()["host"])
"""


def python(code: str, *arguments) -> list[int]:
    done = subprocess.run(
        [sys.executable, "-c", code, *map(str, arguments)],
        cwd=ROOT,
        check=True,
        capture_output=True,
        text=True,
    )
    return [int(line) for line in done.stdout.splitlines()]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Llama-3.1-8B at 1/50 of its bytes: 319 MB, of which the embedding is 21 MB and a layer 9."""
    folder = tmp_path_factory.mktemp("streaming")
    python(_WRITE, folder)
    yield folder
    shutil.rmtree(folder)  # a gigabyte that pytest would keep for three runs


def test_peak_memory_of_a_conversion_and_of_an_export(folder):
    size = (folder / "big" / "model.safetensors").stat().st_size
    assert size > 300e6
    for action in ("convert", "export"):
        nothing, big = python(_CONVERT, folder, action)
        assert big - nothing < size / 3, (action, nothing, big)
