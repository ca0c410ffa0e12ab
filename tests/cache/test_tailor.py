"""TailorKV against its rule written out in NumPy, alone and in a model."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from combkv_jax import generate
from combkv_jax.attention import Attended, xla
from combkv_jax.cache import Cache, LayerCache, QuantizedTokens, Tailor, nbytes
from combkv_jax.config import plain
from combkv_jax.generate import Draw, Sampling, SamplingState, new_cache, prefill
from combkv_jax.model import CombLlama
from tests import oracle, tiny
from tests.cache.plain import (
    DIM,
    HEADS,
    KV_HEADS,
    draw,
    drive,
    heads_of,
    rounded,
    shape,
    traced,
    weights,
)

decode_step = jax.jit(CombLlama.decode_step)


def by_the_rule(tokens, expected, steps, first, window, top, channels, generated):
    """One row: what its tokens get, [n, HEADS, D].

    expected: their queries as told from the layer before, [n, HEADS, D]. steps: tokens of a
    prefill, or, where negative, how many were generated."""
    out = np.zeros(tokens[0].shape)
    for own, query, key, value in heads_of(tokens):
        end = t = 0
        for length in steps:
            for _ in range(abs(length)):
                seen = list(range(t + 1))
                if length < 0:
                    oldest = max(end - window, t + 1 - window - generated, 0)
                    weight = np.abs(expected[t, own].mean(axis=0)) * np.abs(key[:t]).max(axis=0)
                    best = np.argsort(-weight)[:channels]
                    between = np.arange(first, max(oldest, first))
                    score = key[between][:, best] @ query[t].mean(axis=0)[best]
                    chosen = between[np.argsort(-score)[:top]]
                    seen = [*range(min(first, oldest)), *chosen, *range(oldest, t + 1)]
                out[t, own] = weights(query[t], key, seen) @ value[seen]
                t += 1
            end = t if length > 0 else end
    return out


@jax.jit
def extend_as_expected(entry, expected, *arrays):
    return entry.expect(lambda: expected).extend(*arrays, None)


def decode(entry, tokens, expected, steps, dtype):
    """What tokens `steps` of each row get, [rows, steps, HEADS, D], and the entry."""
    out = []
    for step in range(steps):
        guess, *arrays = (
            jnp.asarray(np.stack([x[step] for x in rows])[:, None], dtype)
            for rows in (expected, *zip(*tokens, strict=True))
        )
        attended, entry = extend_as_expected(entry, guess, *arrays)
        out.append(np.asarray(attended.out[:, 0], np.float32))
    return np.stack(out, axis=1), entry


@pytest.mark.parametrize(
    ("told", "options", "dtype"),
    [
        (True, {"first": 2, "window": 3, "top": 4, "channels": 2, "generated": 9}, jnp.float32),
        (False, {"first": 1, "window": 5, "top": 1, "channels": 1, "generated": 2}, jnp.float32),
        (True, {"first": 7, "window": 1, "top": 5, "channels": 3, "generated": 4}, jnp.bfloat16),
    ],
)
def test_it_fetches_what_the_rule_picks_in_every_turn(told, options, dtype):
    rng = np.random.default_rng(options["first"])
    turns = [([(19, 1, 5), (2, 3, 19)], 6), ([(3, 0, 19)], 7)]
    steps = [[19, 2, -6, 3, -7], [1, 3, -6, 0, -7], [5, 19, -6, 19, -7]]
    tokens = [[rounded(x, dtype) for x in own] for own in draw(rng, [37, 17, 56])]
    noise = [told * rng.normal(size=own[0].shape) for own in tokens]
    expected = [rounded(own[0] + n, dtype) for own, n in zip(tokens, noise, strict=True)]
    want = [by_the_rule(*row, **options) for row in zip(tokens, expected, steps, strict=True)]
    entry = Tailor.create(shape(3, 64, options | {"quantized": ()}, dtype))
    place = [0, 0, 0]

    def rest(rows):
        return [[x[at:] for x in own] for own, at in zip(rows, place, strict=True)]

    def check(out, counts):
        close = {"atol": 3e-5} if dtype == jnp.float32 else {"atol": 0.04, "rtol": 0.02}
        for row, count in enumerate(counts):
            span = slice(place[row], place[row] + count)
            got = np.reshape(out[row], (count, HEADS, DIM))
            np.testing.assert_allclose(got, want[row][span], **close)
            place[row] += count

    for prefills, decoded in turns:
        out, entry = drive(rng, entry, rest(tokens), prefills, dtype=dtype)
        check(out, [sum(part) for part in zip(*prefills, strict=True)])
        if told:
            ahead = [x for (x,) in rest([[x] for x in expected])]
            out, entry = decode(entry, rest(tokens), ahead, decoded, dtype)
        else:
            out, entry = drive(rng, entry, rest(tokens), [], decoded, dtype)
        check(out, [decoded] * 3)
    assert entry.count.tolist() == place == [37, 17, 56]


def test_a_later_turn_fetches_what_was_generated():
    """The key that a query asks for, among generated tokens that have left the device."""
    rng = np.random.default_rng(5)
    tokens, asked = draw(rng, [31, 29]), 14  # of 8 prompt tokens, 10 generated, and a second prompt
    for query, key, _ in tokens:
        query[-1] = 1.0
        key[asked] = 3.0
    options = {"quantized": (), "first": 2, "window": 3, "top": 2, "channels": 2, "generated": 16}
    entry = Tailor.create(shape(2, 64, options))
    _, entry = drive(rng, entry, tokens, [(8, 8)], 10)
    entry = drive(rng, entry, [[x[18:] for x in own] for own in tokens], [(12, 10)])[1]
    query = jnp.ones((2, 1, HEADS, DIM))
    index, found = jax.jit(Tailor.choose)(entry, query)
    assert found.tolist() == [2, 2]
    assert (index[:, :, 0] == asked).all()
    np.testing.assert_array_equal(  # the newest of them were written when the next token came
        np.asarray(entry.host_key)[0, :, :30], tokens[0][1][:30].swapaxes(0, 1)
    )
    channels = np.asarray(entry.host_channels)
    np.testing.assert_array_equal(channels.swapaxes(2, 3), np.asarray(entry.host_key))


def test_the_device_holds_what_the_formula_says_and_the_host_the_rest():
    rng = np.random.default_rng(6)
    rows, capacity, first, recent = 3, 4096, 5, 7 + 11
    options = {"quantized": (), "first": first, "window": 7, "generated": 11, "top": 9}
    entry = Tailor.create(shape(rows, capacity, options, jnp.bfloat16))
    _, entry = drive(rng, entry, draw(rng, [60, 1 + 13, 44]), [(47, 1, 31)], 13, jnp.bfloat16)
    number = rows * KV_HEADS * DIM * 2  # bytes of one key or value in every row
    device = (2 * (first + recent) + 1) * number + 2 * rows * 4
    assert nbytes(entry) == {"device": device, "host": 3 * capacity * number}
    held = [x for x in jax.tree.leaves(entry) if x.sharding.memory_kind == "device"]
    assert max(x.size for x in held) <= recent * number // 2


def test_of_any_length_one_step_is_compiled():
    rng = np.random.default_rng(7)
    options = {"quantized": (), "first": 2, "window": 3, "top": 4, "channels": 2, "generated": 5}
    entry = Tailor.create(shape(2, 64, options))
    _, entry = drive(rng, entry, draw(rng, [2, 20]), [(1, 19)], 1)
    before = len(traced)
    drive(rng, entry, draw(rng, [20, 20]), [], 20)
    assert len(traced) == before


def model(rng, **changes) -> CombLlama:
    config = plain(tiny.llama_config(**changes))
    return tiny.build(config, tiny.random_parameters(rng, config))


def test_with_everything_fetched_it_is_the_full_cache(monkeypatch):
    """Layers 0 and 2 on the host and 1 in 16 bits; two turns of ragged rows, in several parts."""
    monkeypatch.setattr(generate, "SEGMENT", 16)
    rng = np.random.default_rng(8)
    lm = model(rng)
    turns = [[rng.integers(0, 97, n).astype(np.int32) for n in (1, 41, 11)] for _ in range(2)]
    answers = rng.integers(0, 97, (2, 6, 3)).astype(np.int32)

    def logits(policy, options):
        cache = new_cache(lm, 100, batch=3, policy=policy, options=options)
        if policy == "tailor":
            kinds = [type(layer).__name__ for layer in cache.layers]
            assert kinds == ["Tailor", "Full", "Tailor"]
        out = []
        for prompts, answer in zip(turns, answers, strict=True):
            last, cache = prefill(lm, cache, prompts)
            out.append(last)
            for token in answer:
                last, cache = decode_step(lm, cache, jnp.asarray(token))
                out.append(last)
        return np.stack(out)

    options = {"quantized": (1,), "bits": 16, "first": 3, "window": 4, "generated": 2}
    options |= {"top": 100, "channels": 12}
    np.testing.assert_allclose(logits("tailor", options), logits("full", {}), atol=1e-4)


def test_published_layers_are_coded():
    cache = new_cache(model(np.random.default_rng(9)), 16, policy="tailor")
    assert [type(layer) for layer in cache.layers] == [QuantizedTokens, Tailor, Tailor]
    assert cache.layers[0].old_key.bits == 2


@dataclasses.dataclass(frozen=True)
class Listening(LayerCache):
    """Keeps what it is told in a list, and attends to the token itself."""

    told: list

    def expect(self, query):
        self.told.append(query())
        return self

    def extend(self, query, key, value, lengths):
        return Attended(jnp.repeat(value, 2, axis=2), jnp.zeros(query.shape[:3])), self


def test_a_query_is_told_from_the_input_of_the_layer_before():
    rng = np.random.default_rng(10)
    lm = model(rng)
    config, told, position = lm.config.text, [], 7
    p = oracle.in_float64(tiny.random_parameters(np.random.default_rng(10), lm.config))
    cache = Cache(tuple(Listening(told) for _ in range(3)), jnp.array([position]))

    def step(lm):
        lm.decode_step(cache, jnp.array([5]))
        return told

    told_queries = jax.jit(step)(lm)
    assert len(told_queries) == 2  # nobody tells the first layer
    x = p["decoder.embed_tokens.weight"][[5]]
    for layer, got in enumerate(told_queries, 1):
        before, own = (f"decoder.layers.{i}" for i in (layer - 1, layer))
        h = oracle.rms_norm(config, x, p[f"{before}.input_layernorm.weight"])
        query = oracle.heads(config, h, p[f"{own}.self_attn.q_proj.weight"])
        np.testing.assert_allclose(got[0], oracle.rotary(config, query, [position]), atol=1e-4)
        x = oracle.llama_layer(config, p, before, x, [position], causal=True)


def sampling_state(cache: Cache) -> SamplingState:
    token, none = jnp.zeros(1, jnp.int32), jnp.zeros(1, bool)
    return SamplingState(cache, token, none, jnp.int32(1), jax.random.key(0))


@pytest.mark.optimized
def test_no_step_copies_what_lies_on_the_host():
    capacity = 2**15
    lm = model(np.random.default_rng(11), num_hidden_layers=2)
    options = {"quantized": (), "channels": 2, "top": 32}
    cache = new_cache(lm, capacity, policy="tailor", options=options)
    line = cache.layers[0].host_key.nbytes
    rest = (Draw.of(Sampling()), jnp.zeros(1, jnp.int32), jnp.int32(9), 16)
    state = sampling_state(cache)
    compiled = generate._decode_all.lower(lm, state, (None, None), *rest).compile()
    used = compiled.memory_analysis()
    held = nbytes(cache)
    assert used.alias_size_in_bytes >= held["host"] + held["device"]
    assert used.temp_size_in_bytes < line


@pytest.mark.optimized
def test_a_prefill_reads_the_host_in_blocks_and_writes_in_place(monkeypatch):
    monkeypatch.setattr(xla, "DECODED_BYTES", 2**16)
    entry = Tailor.create(shape(2, 2**15, {"quantized": ()}))
    query, key = (jnp.zeros((2, 3, h, DIM)) for h in (HEADS, KV_HEADS))
    run = jax.jit(lambda entry, *arrays: entry.prefill(*arrays), donate_argnums=0)
    used = run.lower(entry, query, key, key, jnp.array([3, 1])).compile().memory_analysis()
    assert used.alias_size_in_bytes == sum(nbytes(entry).values())
    assert used.temp_size_in_bytes < entry.host_key.nbytes
