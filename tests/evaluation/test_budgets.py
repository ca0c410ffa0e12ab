"""Budgets become the largest sizes that keep to them, by the bytes that live caches have."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest

from combkv_jax.cache import full_cache_bytes
from combkv_jax.compress import compress
from combkv_jax.errors import RequestError
from combkv_jax.evaluation import budgets
from combkv_jax.evaluation.budgets import CACHES, Asked, Budget, Setting, measure, settle
from tests import text

TOKENS = 1801
SHARE = 0.87
SIZED = [name for name in CACHES if CACHES[name].sizes]
# So small that something is left to be chosen.
GIVEN = {
    "snapkv": {"window": 3, "kernel": 3, "generated": 20},
    "quest": {"page": 7},
    "tailor": {"quantized": (1,), "first": 5, "window": 6, "channels": 2, "generated": 11},
    "infllm": {"first": 5, "window": 6, "block": 9, "representatives": 2},
    "pqcache": {"first": 5, "window": 6, "bits": 2},
}


@pytest.fixture(scope="module")
def lm():
    return text.byte_model("lse", 3, cross_layers=(1,), num_hidden_layers=2, chunk_size=32)


def full_bytes(lm, tokens=TOKENS):
    return full_cache_bytes(lm.config.text, tokens, lm.model.dtype)


def counted(held):
    return held["device"] + held["fetched"]


@pytest.mark.parametrize("policy", SIZED)
def test_bytes_keep_to_the_budget_and_one_step_more_would_not(policy, lm):
    given = GIVEN.get(policy, {}) | ({"quantized": ()} if policy == "tailor" else {})
    asked = Asked(policy, given)
    full = full_bytes(lm)
    if policy == "quest":  # holds everything, whatever it reads
        with pytest.raises(RequestError, match="too small for the quest cache of 1801 tokens"):
            settle(lm, asked, Budget.read(f"{100 * SHARE}%"), TOKENS)
        return
    setting = settle(lm, asked, Budget.read(f"{SHARE * full}B"), TOKENS)
    assert setting == settle(lm, asked, Budget.read(f"{100 * SHARE:.6f}%"), TOKENS)
    assert counted(setting.nbytes(lm)) <= SHARE * full

    def larger(name):
        value = setting.options[name]
        step = {"bits": value, "top": given.get("block", 1)}.get(name, 1)
        return dataclasses.replace(setting, options={**setting.options, name: value + step})

    steps = [larger(name) for name in CACHES[policy].sizes]
    assert min(counted(step.nbytes(lm)) for step in steps) > SHARE * full


@pytest.mark.parametrize("policy", SIZED)
def test_bytes_told_are_those_of_live_arrays(policy, lm):
    tokens = 301
    sized = CACHES[policy].sized(8 if policy == "quantized" else 90, GIVEN.get(policy, {}))
    setting = Setting(policy, {**CACHES[policy].defaults, **sized}, tokens)
    history = None
    if policy == "comb":  # in 16 bits: test_comparison
        setting = dataclasses.replace(setting, options={**setting.options, "bits": 2})
        page = np.random.default_rng(1).integers(0, 256, tokens - 90).astype(np.int32)
        chunks = [page[i : i + 32] for i in range(0, len(page), 32)]
        history = compress(lm.model, [chunks], bits=2)
    assert measure(setting.empty(lm, history)) == setting.nbytes(lm)


@pytest.mark.parametrize("policy", SIZED)
def test_tokens_are_what_a_decoded_query_sees(policy, lm):
    found = settle(lm, Asked(policy, GIVEN.get(policy, {})), Budget.read("100"), TOKENS).options
    seen = {
        "window": lambda o: o["first"] + o["window"],
        "h2o": lambda o: o["heavy"] + o["recent"],
        "snapkv": lambda o: o["budget"],
        "quest": lambda o: o["budget"] + 2,  # 14 pages of 7
        "tailor": lambda o: o["first"] + o["window"] + o["top"],
        "infllm": lambda o: o["first"] + o["window"] + o["top"] + 8,  # 9 blocks of 9
        "pqcache": lambda o: o["first"] + o["window"] + o["top"],
        "comb": lambda o: o["window"],
        "quantized": lambda o: 100 if o["bits"] == 4 else 0,  # it sees them all
    }
    assert seen[policy](found) == 100


@pytest.mark.parametrize("budget", ["1801", "9000", "100%", "1GB"])
def test_a_budget_that_holds_the_context_holds_everything(budget, lm):
    room = TOKENS + budgets.ROOM
    for policy in CACHES:
        found = settle(lm, Asked(policy, GIVEN.get(policy, {})), Budget.read(budget), TOKENS)
        if policy == "quantized":
            assert found.options["bits"] == 16
        elif policy != "full":
            sizes = (*CACHES[policy].sizes, *CACHES[policy].beside)
            unit = CACHES[policy].unit
            assert sum(found.options[n] for n in sizes) > room - (
                found.options[unit] if unit else 1
            )


def test_sizes_that_were_given_stay(lm):
    budget = Budget.read("100")
    assert settle(
        lm, budgets.read_cache("tailor:top=9,quantized=none"), budget, TOKENS
    ).options == {
        **CACHES["tailor"].defaults,
        "top": 9,
        "quantized": (),
        "generated": budgets.ROOM,
    }
    found = settle(lm, budgets.read_cache("h2o:recent=30"), budget, TOKENS).options
    assert found == {"heavy": 70, "recent": 30}


@pytest.mark.parametrize(
    ("policy", "budget", "least"),
    [
        ("tailor", "128", "129 tokens"),
        ("infllm", "511", "512 tokens"),
        ("h2o", "1", "2 tokens"),
        ("window", "4", "5 tokens"),
        ("snapkv", "32", "33 tokens"),
        ("quest", "15", "16 tokens"),
        ("window", "900B", "KiB"),
        ("quantized", "1%", "KiB"),
        ("comb", "2%", "KiB"),
    ],
)
def test_budgets_too_small_are_refused_with_the_least(policy, budget, least, lm):
    with pytest.raises(RequestError, match=f"{budget} is too small for the {policy}.* {least}"):
        settle(lm, Asked(policy, {}), Budget.read(budget), TOKENS)


def test_the_least_is_enough(lm):
    with pytest.raises(RequestError) as said:
        settle(lm, Asked("pqcache", {}), Budget.read("1KiB"), TOKENS)
    least = str(said.value).split("at least ")[1].rstrip(".").replace(" ", "")
    amount = float(least.removesuffix("KiB"))
    assert settle(lm, Asked("pqcache", {}), Budget.read(f"{amount + 0.1:.1f}KiB"), TOKENS)
    with pytest.raises(RequestError):
        settle(lm, Asked("pqcache", {}), Budget.read(f"{amount - 0.1:.1f}KiB"), TOKENS)
