"""A history in fewer bits: what is stored, what is read of it, and what it takes."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from combkv_jax import compress as compression
from combkv_jax.attention import xla
from combkv_jax.cache import Chunks, History, nbytes
from combkv_jax.cache.quantize import Quantized
from combkv_jax.compress import compress
from combkv_jax.errors import RequestError
from tests import tiny
from tests.cache.plain import HEADS, shape
from tests.cache.test_quantized import stored


def random_model(form):
    config = tiny.comb_config(form, (0,), num_hidden_layers=1)
    return tiny.build(config, tiny.random_parameters(np.random.default_rng(21), config))


def draw(rng, *lengths):
    return [rng.integers(0, 97, n).astype(np.int32) for n in lengths]


@jax.jit
def decode(parts):
    return [x.dequantize(0, x.shape[2]) for x in parts]


attend = jax.jit(Chunks.attend)


@pytest.mark.parametrize(("form", "bits"), [("lse", 2), ("tanh", 8)])
def test_it_is_coded_in_groups_that_chunks_and_batches_do_not_move(form, bits, monkeypatch):
    asked, buffers = [], compression._buffers
    monkeypatch.setattr(
        compression, "_buffers", lambda *args: asked.append(args[2]) or buffers(*args)
    )
    rng, model = np.random.default_rng(bits), random_model(form)
    histories = [draw(rng, *[13] * 12, 5), draw(rng, 7), draw(rng, *[13] * 6)]
    whole = compress(model, histories, chunk_batch=2)
    history = compress(model, histories, chunk_batch=2, bits=bits)
    assert asked == [176, 128]  # the longest row; the tokens of a batch, behind less than a group
    assert history.count.tolist() == whole.count.tolist() == [161, 7, 78]
    coded, full = history.layers[0], whole.layers[0]
    parts = decode((coded.key, coded.value))
    for row, n in enumerate([161, 7, 78]):
        for head in range(2):
            key, value = (np.asarray(x)[row, head, :n] for x in (full.key, full.value))
            groups = [stored(key[i : i + 64], bits, 0) for i in range(0, n, 64)]
            wanted = np.concatenate(groups), stored(value, bits, 1)
            for got, want in zip(parts, wanted, strict=True):
                got = np.asarray(got)[row, head, :n]
                assert np.mean(np.abs(got - want) < 1e-4) > 0.99  # one may fall either way
    # Codes, and two float16 for 64 tokens of a key's channel and for each token's value.
    number, rows_and_heads = 2 * 192 * 12 * bits // 8, 3 * 2
    beside = 2 * 2 * (192 // 64 * 12 + 192)
    held = nbytes((coded.key, coded.value))
    assert held == {"device": rows_and_heads * (number + beside), "host": 0}
    query = jnp.asarray(rng.normal(size=(3, 2, HEADS, 12)), jnp.float32)
    decoded = dataclasses.replace(coded, key=parts[0], value=parts[1])
    for got, want in zip(attend(coded, query), attend(decoded, query), strict=True):
        np.testing.assert_allclose(got, want, atol=1e-5)


@pytest.mark.optimized
def test_attention_never_decodes_it_whole(monkeypatch):
    monkeypatch.setattr(xla, "DECODED_BYTES", 2**16)
    tokens, one = 2**15, jnp.zeros((1, 1), jnp.int32)

    def empty():
        parts = (
            Quantized.create(shape(1), tokens, 4, per_token=is_value) for is_value in (False, True)
        )
        return Chunks(*parts, one, one + tokens)

    history = jax.eval_shape(empty)
    query = jax.ShapeDtypeStruct((1, 1, HEADS, shape().head_dim), jnp.float32)
    compiled = jax.jit(Chunks.attend).lower(history, query).compile()
    assert compiled.memory_analysis().temp_size_in_bytes < np.prod(history.key.shape) * 4 / 4


def test_it_is_not_appended_to():
    model, none = random_model("lse"), jnp.zeros((1, 1), jnp.int32)
    coded, full = (
        History((Chunks(x, x, none, none + 5),), none[0] + 5, (True,))
        for x in (Quantized.create(shape(1), 64, 4, per_token=True), jnp.zeros((1, 2, 16, 12)))
    )
    for history, bits in ((coded, 16), (coded, 4), (full, 4)):
        with pytest.raises(RequestError, match="fewer than 16 bits cannot be appended to"):
            compress(model, [draw(np.random.default_rng(5), 13)], history=history, bits=bits)
    with pytest.raises(RequestError, match="bits is 3"):
        compress(model, [[]], bits=3)
