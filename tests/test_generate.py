"""Compression, prefill and decoding against one packed forward pass over everything."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from combkv_jax import compress as compression
from combkv_jax import generate
from combkv_jax.compress import bucket, compress
from combkv_jax.config import plain
from combkv_jax.errors import RequestError
from combkv_jax.generate import Draw, Generation, Sampling, new_cache, prefill, sample
from combkv_jax.model import CombLlama
from tests import tiny

VOCABULARY = 97


def random_model(form, rng, **changes):
    config = plain(tiny.llama_config()) if form == "plain" else tiny.comb_config(form, **changes)
    return tiny.build(config, tiny.random_parameters(rng, config))


def draw(rng, *lengths):
    return [rng.integers(0, VOCABULARY, n).astype(np.int32) for n in lengths]


def packed(histories, texts):
    """The packed batch of rows of (chunks, tokens)."""
    chunks = [chunk for row in histories for chunk in row]
    return {
        "input_ids": np.concatenate(texts),
        "cu_seqlens_q": np.cumsum([0, *map(len, texts)]),
        "chunk_ids": np.concatenate([np.zeros(0, np.int32), *chunks]),
        "cu_seqlens_chunk": np.cumsum([0, *map(len, chunks)]),
        "cu_seqlens_k": np.cumsum([0] + [sum(map(len, row)) for row in histories]),
    }


decode_step = jax.jit(CombLlama.decode_step)


@pytest.mark.parametrize(
    ("form", "policy"),
    [(form, policy) for form in ("plain", "lse", "tanh") for policy in ("full", "window")]
    + [("lse", "tailor")],
)
def test_prefill_and_decoding_equal_one_forward_pass(form, policy, monkeypatch):
    monkeypatch.setattr(generate, "SEGMENT", 16)  # the longest prompt takes three segments
    rng = np.random.default_rng(11)
    model = random_model(form, rng)
    histories = [draw(rng, 13, 5, 13), draw(rng, 2), []] if form != "plain" else [[], [], []]
    prompts, new = draw(rng, 11, 41, 1), draw(rng, 6, 6, 6)
    texts = [np.concatenate(pair) for pair in zip(prompts, new, strict=True)]
    batch = packed(histories, texts)
    if form == "plain":
        batch = {k: v for k, v in batch.items() if "chunk" not in k and not k.endswith("_k")}
    whole = np.split(np.asarray(tiny.logits(model, batch)), batch["cu_seqlens_q"][1:-1])

    history = compress(model, histories, chunk_batch=2) if form != "plain" else None
    options = {"first": 3, "window": 64}  # no token leaves this window
    if policy == "tailor":  # and all that leaves this one is fetched
        options = {"first": 3, "window": 4, "generated": 2, "channels": 12}
    cache = new_cache(model, 47, history, batch=3, policy=policy, options=options)
    logits, cache = prefill(model, cache, prompts)
    for step in range(7):
        for row, prompt in enumerate(prompts):
            np.testing.assert_allclose(logits[row], whole[row][len(prompt) - 1 + step], atol=1e-4)
        if step < 6:
            logits, cache = decode_step(model, cache, jnp.array([n[step] for n in new]))


@pytest.mark.parametrize("form", ["lse", "tanh"])
def test_a_history_does_not_depend_on_how_it_was_made(form):
    rng = np.random.default_rng(12)
    model = random_model(form, rng)
    histories = [draw(rng, 13, 13, 13, 4), draw(rng, 7, 13)]
    first, second = [row[:2] for row in histories], [row[2:] for row in histories]
    made = [compress(model, histories, chunk_batch=n) for n in (1, 3, 8)]
    made.append(compress(model, second, history=compress(model, first)))
    late = compress(model, [histories[0], []], history=compress(model, [[], histories[1]]))
    sinks = [i for i, kept in enumerate(late.kept) if not kept and late.layers[i] is not None]
    assert len(sinks) == (form == "lse")
    for i in sinks:  # a row that begins later has its first tokens all the same
        assert late.layers[i].end.tolist() == made[0].layers[i].end.tolist()
        np.testing.assert_allclose(late.layers[i].key, made[0].layers[i].key, atol=1e-4)
    made.append(late)
    want = [np.concatenate(row) for row in histories]
    encoded = tiny.run(model, packed(histories, draw(rng, 1, 1)))[1]
    borders = np.cumsum([0, *map(len, want)])
    for history in made:
        assert history.count.tolist() == [len(w) for w in want]
        for number, layer in enumerate(model.config.cross_layers):
            chunks = history.layers[layer]
            key = model.history_key(number, encoded[number][0])
            for row, count in enumerate(map(len, want)):
                span = slice(borders[row], borders[row + 1])
                for got, all_rows in ((chunks.key, key), (chunks.value, encoded[number][1])):
                    got = np.asarray(got)[row, :, :count].swapaxes(0, 1)
                    np.testing.assert_allclose(got, all_rows[span], atol=1e-4)


@pytest.mark.parametrize("form", ["lse", "tanh"])
def test_one_history_serves_many_questions_and_stays(form):
    rng = np.random.default_rng(13)
    model = random_model(form, rng)
    history = compress(model, [draw(rng, 13, 9)])
    prompts = draw(rng, 5, 17, 2)

    def ask(*some):
        cache = new_cache(model, 40, history, batch=len(some))
        logits, cache = prefill(model, cache, some)
        run = Generation.start(model, cache, logits, Sampling(), [], 9)
        return run.run()

    together = ask(*prompts)
    assert together == [ask(prompt)[0] for prompt in prompts]


@pytest.mark.once
def test_stream_and_fused_loop_draw_the_same_tokens():
    rng = np.random.default_rng(14)
    model = random_model("lse", rng)
    history = compress(model, [draw(rng, 13)])
    for sampling in (Sampling(), Sampling(0.9, 7, 0.8, seed=3), Sampling(1.3, seed=4)):

        def start(sampling=sampling, stop=()):
            cache = new_cache(model, 40, history, batch=2)
            logits, cache = prefill(model, cache, [np.array([3, 1, 4]), np.array([1, 5])])
            return Generation.start(model, cache, logits, sampling, stop, 12)

        streamed = np.stack(list(start()), axis=1)
        assert streamed.tolist() == start().run()
        # A stop token ends its row, and the generation when all rows have ended.
        stop = int(streamed[0, 4])
        ended = start(stop=[stop]).run()
        assert ended[0] == streamed[0, : list(streamed[0]).index(stop) + 1].tolist()
        assert all(len(row) <= 12 for row in ended)


def test_a_generation_can_be_continued():
    rng = np.random.default_rng(15)
    model = random_model("lse", rng)
    prompt, history = draw(rng, 7)[0], compress(model, [draw(rng, 13)])

    def start(cache, prompt, limit):
        logits, cache = prefill(model, cache, [prompt])
        return Generation.start(model, cache, logits, Sampling(), [], limit)

    whole = start(new_cache(model, 40, history), prompt, 12).run()[0]
    run = start(new_cache(model, 40, history), prompt, 5)
    first = run.run()[0]
    assert first == whole[:5]
    # The newest token is not in the cache yet; it goes in front of whatever comes next.
    assert start(run.cache, np.array(first[-1:]), 7).run()[0] == whole[5:]


def test_steps_and_the_fused_loop_may_follow_each_other():
    rng = np.random.default_rng(24)
    model = random_model("lse", rng)

    def start():
        cache = new_cache(model, 40)
        logits, cache = prefill(model, cache, [np.array([3, 1, 4])])
        return Generation.start(model, cache, logits, Sampling(1.0), [], 9)

    whole = start().run()[0]
    run = start()
    steps = iter(run)
    first = [int(next(steps)[0]) for _ in range(4)]
    assert first == whole[:4]
    run.warm_up()
    assert run.run()[0] == whole[3:]  # from the newest token on
    assert [int(t[0]) for t in run] == whole[-1:]  # and then there is nothing left


def test_greedy_takes_the_likeliest():
    logits = jnp.asarray(np.random.default_rng(16).normal(size=(5, 31)), jnp.float32)
    got = sample(logits, jax.random.key(0), Draw.of(Sampling()))
    assert got.tolist() == np.argmax(logits, axis=1).tolist()


@pytest.mark.parametrize(
    ("sampling", "allowed"),
    [
        (Sampling(0.7, top_k=3), [4, 2, 0]),
        (Sampling(1.0, top_p=0.6), [4, 2]),  # .4 + .3 reach .6
        (Sampling(1.0, top_p=1e-6), [4]),
        (Sampling(2.0, top_k=2, top_p=0.99), [4, 2]),
    ],
)
def test_only_allowed_tokens_are_drawn_in_their_proportions(sampling, allowed):
    probability = np.array([0.15, 0.1, 0.3, 0.05, 0.4])
    logits = jnp.tile(jnp.log(jnp.asarray(probability, jnp.float32)), (4000, 1))
    drawn = np.asarray(sample(logits, jax.random.key(1), Draw.of(sampling)))
    want = np.zeros(5)
    want[allowed] = probability[allowed] ** (1 / sampling.temperature)
    want /= want.sum()
    got = np.bincount(drawn, minlength=5) / len(drawn)
    assert set(drawn) <= set(allowed)
    np.testing.assert_allclose(got, want, atol=0.04)  # over 5 standard deviations


def test_a_row_s_draw_does_not_depend_on_its_neighbours():
    logits = jnp.asarray(np.random.default_rng(17).normal(size=(4, 31)), jnp.float32)
    draw_ = Draw.of(Sampling(1.0, seed=5))
    key = jax.random.key(5)
    assert sample(logits, key, draw_)[:2].tolist() == sample(logits[:2], key, draw_).tolist()


@pytest.mark.parametrize("form", ["lse", "tanh"])
@pytest.mark.optimized
def test_a_decode_step_copies_neither_weights_nor_cache(form):
    """Temporaries stay far below the cache and the weights, and the cache is updated in place."""
    config = tiny.comb_config(form, hidden_size=64, intermediate_size=512, vocab_size=512)
    model = tiny.build(config, tiny.random_parameters(np.random.default_rng(18), config))
    rows = [draw(np.random.default_rng(19), *[13] * 600)]
    cache = new_cache(model, 8192, compress(model, rows), batch=1)
    changed, borrowed = cache.split()
    state = generate.SamplingState(
        changed, jnp.zeros(1, int), jnp.zeros(1, bool), jnp.int32(0), jax.random.key(0)
    )
    step = jax.jit(generate.decode, donate_argnames="state")
    compiled = step.lower(model, state, borrowed, Draw.of(Sampling()), jnp.array([-1])).compile()
    used = compiled.memory_analysis()
    recent = sum(x.nbytes for x in jax.tree.leaves(changed))
    one_array = changed.layers[1].recent.key.nbytes
    assert used.alias_size_in_bytes >= recent - 64
    assert used.temp_size_in_bytes < one_array


@pytest.mark.parametrize("form", ["lse", "tanh"])
@pytest.mark.optimized
def test_encoding_needs_no_more_memory_for_a_longer_history(form):
    """Beside the cache itself, which is written in place."""
    model = random_model(form, np.random.default_rng(23))
    ids, some = jnp.zeros((4, 13), jnp.int32), jnp.zeros(4, jnp.int32)

    def used(capacity):
        buffers = compression._buffers(model, 1, capacity, None)
        lowered = compression._encode_into.lower(model, buffers, ids, some, some, some)
        memory = lowered.compile().memory_analysis()
        assert memory.alias_size_in_bytes == sum(x.nbytes for pair in buffers for x in pair)
        return memory.temp_size_in_bytes

    assert used(65536) == used(1024)


def test_lengths_share_compiled_shapes(monkeypatch):
    traced = []
    original = CombLlama.encode_chunks

    def counted(self, ids, *rest):
        traced.append(ids.shape)
        return original(self, ids, *rest)

    monkeypatch.setattr(CombLlama, "encode_chunks", counted)
    compression._encode_into.clear_cache()
    rng = np.random.default_rng(20)
    model = random_model("lse", rng)
    counts = (50, 51, 52, 53, 54)
    assert len({bucket(13 * n) for n in counts}) == 1
    for count in counts:
        compress(model, [draw(rng, *[13] * count)], chunk_batch=8)
    assert len(traced) == 1


def test_buckets_are_few_and_waste_at_most_an_eighth():
    sizes = np.unique(np.geomspace(1, 10**7, 3000).astype(int))
    buckets = [bucket(int(n)) for n in sizes]
    assert all(n <= b <= max(n + 16, n * 9 / 8) for n, b in zip(sizes, buckets, strict=True))
    assert len(set(buckets)) < 9 * 21
    assert [bucket(131072), bucket(1048576)] == [131072, 1048576]


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda m: compress(m, [[]]), "the history has no tokens"),
        (lambda m: compress(m, [[np.zeros(14, int)]]), "a chunk has 14 tokens; 1 to 13"),
        (lambda m: compress(m, [[np.zeros(0, int)]]), "a chunk has 0 tokens"),
        (lambda m: prefill(m, new_cache(m, 8), [np.zeros(0, int)]), "a prompt has no tokens"),
        (lambda m: new_cache(m, 8, compress(m, [[np.ones(1, int)]] * 2), batch=3), "use 1 or 3"),
        (lambda m: prefill(m, new_cache(m, 8), []), "there are 0 prompts"),
        (lambda m: compress(m, [[], []], history=compress(m, [[np.ones(1, int)]])), "has 1 rows"),
        (lambda m: new_cache(m, 8, policy="window", options={"window": 0}), "at least 1"),
        (lambda m: new_cache(m, 8, policy="window", options={"window": 0, "first": 0}), "at least"),
        (lambda m: Sampling(seed=-1), "seed is -1"),
        (lambda m: compress(m, [[np.ones(1, int)]], chunk_batch=-1), "chunk_batch is -1"),
        (lambda m: Sampling(-1.0), "temperature is -1.0"),
        (lambda m: Sampling(float("nan")), "temperature is nan"),
        (lambda m: Sampling(1.0, top_k=-1), "top_k is -1"),
        (lambda m: Sampling(1.0, top_p=0.0), "top_p is 0.0"),
    ],
)
def test_wrong_requests_are_refused_in_words(call, words):
    with pytest.raises(RequestError, match=words):
        call(random_model("lse", np.random.default_rng(21)))


def test_weights_that_are_not_numbers_are_noticed():
    config = plain(tiny.llama_config())
    parameters = tiny.random_parameters(np.random.default_rng(25), config)
    parameters["decoder.norm.weight"][3] = np.nan
    model = tiny.build(config, parameters)
    logits, cache = prefill(model, new_cache(model, 8), [np.array([1, 2])])
    with pytest.raises(RequestError, match="logits are not finite"):
        Generation.start(model, cache, logits, Sampling(), [], 4)


def test_a_plain_llama_has_nothing_to_compress_into():
    with pytest.raises(RequestError, match="keeps no history"):
        compress(random_model("plain", np.random.default_rng(22)), [[np.ones(3, int)]])
