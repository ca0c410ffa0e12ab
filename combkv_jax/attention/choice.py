"""Which implementation of attention computes: the one asked for by name, or the first that can.

An implementation is a module with `attention` and, where it does not run everywhere, `check`, which
raises NotImplementedError with the reason. Those of a GPU are imported only where there is one.
"""

from __future__ import annotations

import functools
import importlib
import re
from collections.abc import Callable

import jax

from combkv_jax.attention import reference, xla
from combkv_jax.attention.source import Source, is_coded
from combkv_jax.errors import RequestError

ANYWHERE = {"xla": xla, "reference": reference}
GPU = ("pallas", "cudnn")  # in the order in which to try them
IMPLEMENTATIONS = (*ANYWHERE, *GPU)
AUTO = "auto"
HOPPER = re.compile(r"\bG?H(20|100|200|800)\b")  # compute capability 9.0, by the device's name
OLDEST_JAX = (0, 11)  # of the kernels; before, Mosaic GPU has other names for what they use

_used: set[str] = set()
# What `attention` takes when its caller names none; None chooses by device and arrays. XLA until
# the kernels have been measured on a GPU.
_default: str | None = "xla"


def default() -> str | None:
    """What callers that name no implementation get."""
    return _default


def use(name: str) -> None:
    """From here on callers that name no implementation get this one, or with "auto" what `choose`
    takes. Programs that are compiled already stay as they are."""
    global _default
    _default = None if name == AUTO else name


def used() -> list[str]:
    """The implementations that this process has chosen so far, for a run's table."""
    return sorted(_used)


def choose(query: jax.Array, key: Source, value: Source, named: str | None = None) -> str:
    """The implementation for arrays of these shapes on the present device: `named` if given, else
    the first of pallas, cudnn and xla that takes them; on a CPU always xla.

    A device is present if it is the default one, or that of the abstract mesh in use.
    Raises RequestError for a name that is not known, and, saying why, where it cannot run.
    """
    if named is not None and named not in IMPLEMENTATIONS:
        known = ", ".join(IMPLEMENTATIONS)
        raise RequestError(f"attention implementation {named!r} is not one of {known}.")
    if named in ANYWHERE:
        return named
    device = _device()
    if named is None:
        if device.platform != "gpu":
            return "xla"
        return next((n for n in GPU if _refusal(n, device, query, key, value) is None), "xla")
    reason = _refusal(named, device, query, key, value)
    if reason is not None:
        raise RequestError(
            f"attention implementation {named!r} cannot run here: {reason}; leave it out, or "
            "choose 'xla', which takes everything."
        )
    return named


def function(name: str) -> Callable:
    """The attention of that name, differentiable."""
    _used.add(name)
    return ANYWHERE[name].attention if name in ANYWHERE else _with_gradient(name)


def _device():
    abstract = jax.sharding.get_abstract_mesh().abstract_device
    if abstract is not None:
        return abstract
    chosen = jax.config.jax_default_device
    if isinstance(chosen, str):
        return jax.devices(chosen)[0]
    return chosen or jax.devices()[0]


def _capability(device) -> str:
    return getattr(device, "compute_capability", "8.0")  # an abstract device does not tell


def _refusal(name: str, device, query, key, value) -> str | None:
    """Why that GPU implementation cannot compute this; None where it can."""
    if device.platform != "gpu":
        return f"it is for GPUs, and this is a {device.platform}"
    if name == "pallas":
        if jax.__version_info__ < OLDEST_JAX:
            return f"it needs jax 0.11 or newer, and this is {jax.__version__}"
        if not HOPPER.search(device.device_kind):
            return f"it is for Hopper GPUs, such as H100 and H200, and this is {device.device_kind}"
        if jax.device_count() > 1 and device.platform == jax.default_backend():
            return f"there are {jax.device_count()} GPUs, and a kernel does not divide its arrays"
    elif "NVIDIA" not in device.device_kind or float(_capability(device)) < 8:
        return f"it is for NVIDIA GPUs from Ampere on, and this is {device.device_kind}"
    try:
        _module(name, key).check(query, key, value)
    except NotImplementedError as reason:
        return str(reason)
    return None


def _module(name: str, key: Source):
    if name == "pallas":
        name = "decode" if is_coded(key) else "flash"
    return importlib.import_module(f"combkv_jax.attention.{name}")


@functools.cache
def _with_gradient(name: str) -> Callable:
    """A kernel's attention with the gradient of XLA's, which counts that of the log-sum-exp too, as
    a merge needs it (cuDNN's own does not)."""

    @jax.custom_vjp
    def compute(query, key, value, start, end):
        return _module(name, key).attention(query, key, value, start, end)

    def forward(*arrays):
        return compute(*arrays), arrays

    def backward(arrays, gradient):
        *sources, start, end = arrays
        _, pull = jax.vjp(lambda *a: xla.attention(*a, start, end), *sources)
        return *pull(gradient), None, None

    compute.defvjp(forward, backward)
    return compute
