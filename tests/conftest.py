"""Fixtures shared by the tests."""

from __future__ import annotations

from pathlib import Path

import pytest


@pytest.fixture(scope="session")
def golden_folder() -> Path:
    """Weights, inputs, outputs and gradients of a small model of the original PyTorch CombLlama."""
    folder = Path(__file__).parents[2] / "shared/reference/combllama_tiny"
    if not folder.is_dir():
        pytest.skip("the reference data (../shared/reference) does not lie beside this clone")
    return folder
