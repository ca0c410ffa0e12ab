"""Every policy against attention written out in NumPy, over prefills and decoded tokens."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from combkv_jax.attention import xla
from combkv_jax.cache import POLICIES, Chunks, Comb, create_cache, full_cache_bytes, nbytes, write
from combkv_jax.errors import RequestError
from tests import tiny
from tests.cache.plain import DIM, FREQUENCIES, HEADS, KV_HEADS, draw, drive, shape, traced

# Of every policy but `window` enough for all tokens of the first test, and no more.
OPTIONS = {
    "full": {},
    "window": {"first": 3, "window": 7},
    "quantized": {"bits": 1},
    "h2o": {"heavy": 25, "recent": 4},
    "snapkv": {"budget": 20, "window": 3, "kernel": 3, "generated": 9},
    "quest": {"budget": 30, "page": 5},
    "tailor": {"quantized": (), "first": 2, "window": 3, "top": 26, "channels": 2, "generated": 4},
    "infllm": {"first": 2, "window": 3, "block": 4, "representatives": 2, "top": 24},
    "pqcache": {"first": 2, "window": 3, "top": 24, "bits": 2, "iterations": 2},
}


def turned(x, angle):
    """x [..., DIM] turned by angle * FREQUENCIES, halves against halves."""
    cos, sin = np.cos(angle * FREQUENCIES), np.sin(angle * FREQUENCIES)
    a, b = np.split(x, 2, axis=-1)
    return np.concatenate([a * cos - b * sin, b * cos + a * sin], axis=-1)


def seen(policy, index):
    """(token, how far the query is turned towards it) for each token that `index` sees."""
    if policy != "window":
        return [(j, 0) for j in range(index + 1)]
    first, window = OPTIONS["window"]["first"], OPTIONS["window"]["window"]
    recent = [(j, 0) for j in range(max(0, index - window + 1), index + 1)]
    closer = min(0, first + window - 1 - index)  # the paper's renumbering, as a distance
    return [(j, closer) for j in range(min(first, max(0, index - window + 1)))] + recent


def expected(policy, query, key, value, index):
    """The newest token's attention [HEADS, DIM] in float64; key, value [tokens, KV_HEADS, DIM]."""
    out = np.zeros((HEADS, DIM))
    for head in range(HEADS):
        kv = head // (HEADS // KV_HEADS)
        logits = np.array(
            [turned(query[head], c) @ key[j, kv] / DIM**0.5 for j, c in seen(policy, index)]
        )
        weights = np.exp(logits - logits.max())
        out[head] = weights @ value[[j for j, _ in seen(policy, index)], kv] / weights.sum()
    return out


@pytest.mark.parametrize("policy", POLICIES)
def test_prefills_and_decoded_tokens_of_ragged_rows(policy):
    rng = np.random.default_rng(7)
    prefills = [(5, 1, 4), (6, 17, 0), (1, 2, 13)]  # real tokens of each row in each prefill
    tokens = draw(rng, [sum(part) + 9 for part in zip(*prefills, strict=True)])
    entry = POLICIES[policy].create(shape(options=OPTIONS[policy]))
    out, _ = drive(rng, entry, tokens, prefills, 9)
    for row, (query, key, value) in enumerate(tokens):
        for t in range(len(query)):
            want = expected(policy, query[t], key, value, t)
            np.testing.assert_allclose(out[row][t], want, atol=2e-5)


@pytest.mark.parametrize("policy", POLICIES)
def test_decoding_never_compiles_anew_and_keeps_every_dtype(policy):
    rng = np.random.default_rng(10)
    small = {
        "h2o": {"heavy": 3, "recent": 2},
        "snapkv": {"budget": 4, "window": 2, "generated": 2},
        "quest": {"budget": 4, "page": 2},
        "tailor": {**OPTIONS["tailor"], "top": 4},
        "infllm": {**OPTIONS["infllm"], "top": 4},
        "pqcache": {**OPTIONS["pqcache"], "top": 4},
    }
    options = {**OPTIONS, **small}[policy]
    entry = POLICIES[policy].create(shape(options=options, dtype=jnp.bfloat16))
    tokens = draw(rng, [16, 18, 17])
    begin = jax.tree.map(lambda x: (x.shape, x.dtype), entry)
    _, entry = drive(rng, entry, tokens, [(7, 9, 8)], 1, jnp.bfloat16)
    before = len(traced)
    out, entry = drive(rng, entry, tokens, [], 8, jnp.bfloat16)
    assert len(traced) == before
    assert jax.tree.map(lambda x: (x.shape, x.dtype), entry) == begin
    assert all(np.isfinite(row).all() for row in out)


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.optimized
def test_a_decode_step_writes_into_the_donated_entry(policy, monkeypatch):
    monkeypatch.setattr(xla, "DECODED_BYTES", 2**16)
    options = {
        "window": {"first": 4, "window": 2**14},
        "tailor": {"quantized": (), "channels": 2},
    }
    # An array rather than its shape, which does not tell whether it lies in host memory.
    entry = POLICIES[policy].create(shape(2, 2**15, options.get(policy, {})))
    held = sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(entry))
    query, key = (jax.ShapeDtypeStruct((2, 1, h, DIM), jnp.float32) for h in (HEADS, KV_HEADS))
    step = jax.jit(lambda entry, *arrays: entry.extend(*arrays, None), donate_argnums=0)
    used = step.lower(entry, query, key, key).compile().memory_analysis()
    assert used.alias_size_in_bytes == held
    # Quest reads 1024 of 32768 tokens; the logits of all are larger in proportion at this size.
    assert used.temp_size_in_bytes < held / 2


@pytest.mark.parametrize(
    ("policy", "options", "tokens"),
    [("h2o", {"heavy": 50, "recent": 14}, 64), ("snapkv", {"budget": 64, "generated": 32}, 96)],
)
def test_a_policy_that_evicts_holds_its_budget_and_no_more(policy, options, tokens):
    text = tiny.llama_config()
    held = nbytes(create_cache(text, policy, 2, 10_000, jnp.bfloat16, options))["device"]
    keys_values = 2 * full_cache_bytes(text, tokens, jnp.bfloat16)
    beside = 3 * 2 * 4 * 32 * 12 * 2 + 3 * 2 * 2 * 64 * 4 + 4096  # queries, masses, counters
    assert keys_values <= held <= keys_values + beside


@pytest.mark.parametrize(
    ("policy", "options", "message"),
    [
        ("quantized", {"bits": 3}, "bits is 3; keys and values are kept in 1, 2, 4, 8 or 16 bits"),
        ("h2o", {"heavy": 0}, "heavy of the h2o cache is 0; it must be a whole number of at least"),
        ("h2o", {"window": 5}, "the h2o cache has no option 'window'; it takes heavy, recent"),
        ("snapkv", {"budget": 32}, "budget of the snapkv cache is 32; it must be larger than its"),
        ("snapkv", {"kernel": 4}, "kernel of the snapkv cache is 4; it must be an odd number"),
        ("quest", {"page": 2.5}, "page of the quest cache is 2.5; it must be a whole number"),
        ("tailor", {"top": 0}, "top of the tailor cache is 0; it must be a whole number of at le"),
        ("tailor", {"bits": 5}, "bits is 5; keys and values are kept in 1, 2, 4, 8 or 16 bits"),
        ("tailor", {"page": 1}, "no option 'page'; it takes quantized, bits, first, window, top"),
        ("tailor", {"quantized": (3,)}, r"is \(3,\); it must be a list of layers, each from 0 to"),
        ("tailor", {"quantized": 1}, "quantized of the tailor cache is 1; it must be a list of"),
        ("infllm", {"block": 0}, "block of the infllm cache is 0; it must be a whole number of at"),
        ("pqcache", {"parts": 5}, "parts of the pqcache cache is 5; it must divide the 12 chan"),
        ("pqcache", {"bits": 9}, "bits of the pqcache cache is 9; a code has 1 to 8 bits"),
    ],
)
def test_wrong_options_are_refused_in_words(policy, options, message):
    with pytest.raises(RequestError, match=message):
        create_cache(tiny.llama_config(), policy, 1, 64, jnp.float32, options)


def test_a_window_holds_no_more_than_it_shows():
    text = tiny.llama_config()
    cache = create_cache(text, "window", 2, 10_000, jnp.bfloat16, {"first": 4, "window": 32})
    keys_values = 3 * 2 * 2 * 2 * (4 + 32) * 12 * 2  # layers, K and V, rows, heads, tokens, bf16
    small = 4096
    assert keys_values <= nbytes(cache)["device"] <= keys_values + small


def test_sinks_are_ordinary_keys_in_front():
    rng = np.random.default_rng(8)
    query, key, value = (
        jnp.asarray(x, jnp.float32) for x in rng.normal(size=(3, 1, 9, HEADS, DIM))
    )
    key, value = key[:, :, :KV_HEADS], value[:, :, :KV_HEADS]
    full = POLICIES["full"].create(shape(1, 32))
    whole, _ = full.prefill(query, key, value, jnp.array([9]))
    sinks = Chunks(
        key[:, :4].swapaxes(1, 2),
        value[:, :4].swapaxes(1, 2),
        jnp.zeros((1, 1), int),
        jnp.full((1, 1), 4),
    )
    behind, _ = Comb(full, sinks=sinks).prefill(
        query[:, 4:], key[:, 4:], value[:, 4:], jnp.array([5])
    )
    np.testing.assert_allclose(behind.out, whole.out[:, 4:], atol=1e-6)


def test_write_drops_what_is_past_the_end_and_touches_nothing_else():
    rng = np.random.default_rng(9)
    buffer = rng.normal(size=(3, 2, 7, 4)).astype(np.float32)
    new = rng.normal(size=(2, 3, 2, 4)).astype(np.float32)
    index, rows = np.array([[5, 6, 7], [0, 7, 3]]), np.array([2, 0])
    got = np.asarray(write(jnp.asarray(buffer), jnp.asarray(new), jnp.asarray(index), rows))
    for i, row in enumerate(rows):
        for t, place in enumerate(index[i]):
            if place < 7:
                buffer[row, :, place] = new[i, t]
    np.testing.assert_array_equal(got, buffer)


@pytest.mark.optimized
def test_writing_into_a_donated_buffer_copies_nothing():
    buffer = jax.ShapeDtypeStruct((2, 3, 4096, 16), jnp.float32)
    new = jax.ShapeDtypeStruct((2, 1, 3, 16), jnp.float32)
    index, rows = (jax.ShapeDtypeStruct(s, jnp.int32) for s in ((2, 1), (2,)))
    compiled = jax.jit(write, donate_argnums=0).lower(buffer, new, index, rows).compile()
    used = compiled.memory_analysis()
    assert used.alias_size_in_bytes == 2 * 3 * 4096 * 16 * 4
    assert used.temp_size_in_bytes < 2**14


def test_an_unknown_policy_is_refused_with_the_list():
    with pytest.raises(RequestError, match="'lru' is not one of full, window"):
        create_cache(tiny.llama_config(), "lru", 1, 8, jnp.float32)
