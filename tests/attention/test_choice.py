"""Which implementation is taken where, what it says of itself, and its gradient."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from combkv_jax.attention import attention, choice, choose, used
from combkv_jax.errors import RequestError
from tests.attention.cases import Case, expected
from tests.attention.test_flash import abstract, interpreted, needs_interpreter, on
from tests.test_planner import needs_compiler


def arrays(queries=1, keys=256, dim=128, dtype="bfloat16"):
    return Case(1, queries, 4, 2, keys, dim, dtype).draw()


def test_a_cpu_takes_xla_and_pays_nothing_for_the_choice():
    given = arrays()
    jaxprs = [
        str(jax.make_jaxpr(lambda *a, n=name: attention(*a, implementation=n))(*given))
        for name in (None, "xla")
    ]
    assert jaxprs[0] == jaxprs[1]
    assert choose(*given[:3]) == "xla"
    assert "xla" in used()


def test_callers_that_name_none_get_what_is_in_use(monkeypatch):
    monkeypatch.setattr(choice, "_default", "xla")
    given = arrays()
    choice.use("cudnn")
    with pytest.raises(RequestError, match="'cudnn' cannot run here"):
        attention(*given)
    choice.use("auto")
    assert choice.default() is None
    assert attention(*given).out.shape == given[0].shape


@pytest.mark.parametrize("name", ["pallas", "cudnn"])
def test_a_gpu_implementation_asked_for_on_a_cpu_is_refused(name):
    with pytest.raises(RequestError, match=f"'{name}' cannot run here: .* GPUs.* is a cpu; .*xla"):
        attention(*arrays(), implementation=name)


@needs_interpreter
@pytest.mark.parametrize(
    ("gpu", "size", "name"),
    [
        ("h200", {}, "pallas"),
        ("h100", {"queries": 64}, "pallas"),
        ("h200", {"queries": 64, "dim": 96}, "cudnn"),
        ("h200", {"dim": 96}, "xla"),
        ("h200", {"dtype": "float32"}, "xla"),
        ("a100-40", {"queries": 64}, "cudnn"),
        ("rtx-4090", {}, "xla"),
        ("Tesla T4", {"queries": 64}, "xla"),
        ("AMD Instinct MI300X", {"queries": 64}, "xla"),
    ],
)
def test_the_first_that_can(gpu, size, name):
    with on(gpu):
        assert choose(*arrays(**size)[:3]) == name


@needs_interpreter
@pytest.mark.parametrize(
    ("gpu", "name", "size", "reason"),
    [
        ("a100-40", "pallas", {}, "for Hopper GPUs, .* this is NVIDIA A100-SXM4-40GB"),
        ("Tesla T4", "cudnn", {"queries": 64}, "from Ampere on, and this is Tesla T4"),
        ("h200", "pallas", {"keys": 255}, "there are 255 keys"),
        ("h200", "cudnn", {"keys": 255, "queries": 64}, "255 keys, and it takes even"),
        ("h200", "cudnn", {"queries": 64, "dtype": "float32"}, "not float32"),
    ],
)
def test_what_cannot_run_says_why(gpu, name, size, reason):
    with on(gpu), pytest.raises(RequestError, match=reason):
        choose(*arrays(**size)[:3], name)


def test_an_old_jax_has_no_kernel(monkeypatch):
    monkeypatch.setattr(jax, "__version_info__", (0, 10, 2))
    with on("h200"):
        assert choose(*arrays()[:3]) == "xla"
        with pytest.raises(RequestError, match=r"needs jax 0\.11 or newer"):
            choose(*arrays()[:3], "pallas")


@needs_interpreter
def test_a_source_shared_by_all_rows_and_its_gradient():
    """The kernel's value and the gradient of XLA's, of the log-sum-exp too."""
    query, key, value, start, end = Case(2, 1, 2, 1, 72, 64).draw()
    key, value = key[:1], value[:1]

    def total(query, key, value, name):
        got = attention(query, key, value, start, end, implementation=name)
        seen = jnp.where(jnp.isneginf(got.lse), 0.0, got.lse)
        return jnp.sum(jnp.sin(got.out.astype(jnp.float32))) + jnp.sum(seen), got

    run = jax.grad(total, (0, 1, 2), has_aux=True)
    got, attended = interpreted(lambda *a: run(*a, "pallas"), query, key, value)
    assert "pallas" in used()
    out, lse = expected(query, *(jnp.repeat(x, 2, 0) for x in (key, value)), start, end)
    np.testing.assert_allclose(np.asarray(attended.out, np.float32), out, atol=0.02, rtol=0.01)
    np.testing.assert_allclose(attended.lse, lse, atol=1e-4)
    want, _ = jax.jit(run, static_argnums=3)(query, key, value, "xla")
    for a, b in zip(got, want, strict=True):
        assert np.any(np.asarray(b, np.float32))
        np.testing.assert_allclose(*(np.asarray(x, np.float32) for x in (a, b)), atol=0.02)


@needs_compiler
def test_cudnn_compiles_and_keeps_the_log_sum_exp_in_float32():
    arrays = abstract((2, 64, 8, 64), (2, 2, 256, 64))
    with on("h200"):
        lowered = jax.jit(lambda *a: attention(*a, implementation="cudnn")).lower(*arrays)
    assert lowered.out_info.lse.dtype == jnp.float32
    text = lowered.compile().as_text()
    assert "cudnn$fmhaSoftmax" in text or "__cudnn" in text
