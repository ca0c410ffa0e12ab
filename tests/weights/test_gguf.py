"""GGUF files written by llama.cpp's own package and read by ours."""

from __future__ import annotations

import gguf
import numpy as np
import pytest

from combkv_jax import weights
from combkv_jax.config import PRESETS, RopeScaling
from combkv_jax.errors import RequestError
from combkv_jax.weights.gguf import open_gguf, rope_scaling
from combkv_jax.weights.source import DTYPES
from tests import tiny
from tests.weights import files

Type = gguf.GGMLQuantizationType


def read_all(path):
    return {n: t.read(DTYPES["float32"]) for n, t in open_gguf(path).tensors.items()}


def no_heads(writer):
    writer.kv_data[0].pop("llama.attention.key_length")
    writer.kv_data[0].pop("llama.attention.head_count")
    writer.add_head_count(0)


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize(("heads", "kv_heads"), [(4, 1), (6, 2), (3, 3)])
def test_config_and_weights_come_back(tmp_path, tied, heads, kv_heads):
    config = files.llama_config(
        num_attention_heads=heads, num_key_value_heads=kv_heads, tie_word_embeddings=tied
    )
    parameters = tiny.random_llama(np.random.default_rng(heads), config)
    path = files.write_gguf(tmp_path / "model.gguf", config, parameters)
    source = open_gguf(path)
    assert source.config.text == config
    assert not source.config.cross_layers
    assert not source.unknown
    files.assert_equal(read_all(path), parameters)


@pytest.mark.parametrize("kind", ["F16", "BF16", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "TQ2_0"])
def test_quantised_weights_equal_the_package_s_own_expansion(tmp_path, kind):
    kind = Type[kind]
    config = files.llama_config(hidden_size=256, intermediate_size=512, head_dim=64)
    parameters = tiny.random_llama(np.random.default_rng(1), config)
    path = files.write_gguf(tmp_path / "model.gguf", config, parameters, kind)
    for name, array in read_all(path).items():
        expected = parameters[name]
        if expected.ndim == 2:  # rows are quantised on their own, so their order changes nothing
            expected = gguf.dequantize(gguf.quantize(expected, kind), kind)
        np.testing.assert_array_equal(array, expected, err_msg=name)


@pytest.mark.parametrize("kind", sorted(gguf.quants._type_traits, key=lambda kind: kind.name))
def test_every_kind_the_package_expands_is_read_in_blocks(tmp_path, kind, monkeypatch):
    monkeypatch.setattr("combkv_jax.weights.source.BLOCK_BYTES", 3 * 4 * 512)  # three rows a block
    config = files.llama_config(hidden_size=512, vocab_size=53)
    per_block, block_bytes = gguf.GGML_QUANT_SIZES[kind]
    rng = np.random.default_rng(kind.value)
    raw = rng.integers(0, 256, (53, 512 // per_block * block_bytes), dtype=np.uint8)
    raw &= 0x3F  # keeps the scales finite
    parameters = tiny.random_llama(rng, config)
    del parameters["decoder.embed_tokens.weight"]

    def metadata(writer):
        writer.add_tensor("token_embd.weight", raw, raw_dtype=kind)

    path = files.write_gguf(tmp_path / "model.gguf", config, parameters, metadata=metadata)
    tensor = open_gguf(path).tensors["decoder.embed_tokens.weight"]
    with np.errstate(all="ignore"):
        np.testing.assert_array_equal(
            tensor.read(DTYPES["float32"]), gguf.dequantize(raw, kind).reshape(53, 512)
        )
        assert tensor.read(DTYPES["bfloat16"]).dtype == DTYPES["bfloat16"]


@pytest.mark.parametrize(
    ("kind", "stored"),
    [(None, "float32"), ("F16", "float16"), ("BF16", "bfloat16"), ("Q8_0", "bfloat16")],
)
def test_weights_are_loaded_as_stored(tmp_path, kind, stored):
    config = files.llama_config(hidden_size=64, intermediate_size=96, head_dim=16)
    parameters = tiny.random_llama(np.random.default_rng(8), config)
    path = files.write_gguf(tmp_path / "model.gguf", config, parameters, kind and Type[kind])
    _, arrays, _ = weights.load(path, kept_layers=[1])
    for name, array in parameters.items():
        # norms are always float32 in such a file; one that is quantised is bfloat16 throughout
        dtype = stored if array.ndim == 2 or kind == "Q8_0" else "float32"
        assert arrays[name].dtype == dtype, name
        if kind != "Q8_0":
            expected = array.astype(DTYPES[dtype])
            np.testing.assert_array_equal(np.asarray(arrays[name]), expected)


def test_transformers_reads_the_same_weights(tmp_path):
    pytest.importorskip("torch", reason="torch (the oracle) is not installed")
    from transformers import LlamaConfig, LlamaForCausalLM
    from transformers.modeling_gguf_pytorch_utils import load_gguf_checkpoint

    config = files.llama_config(
        hidden_size=64, intermediate_size=96, head_dim=16, rope_scaling=None
    )
    parameters = tiny.random_llama(np.random.default_rng(2), config)

    def metadata(writer):
        writer.add_vocab_size(config.vocab_size)

    files.write_gguf(tmp_path / "m.gguf", config, parameters, Type.Q8_0, metadata)
    model = LlamaForCausalLM(LlamaConfig(**config.to_hf()))
    theirs = load_gguf_checkpoint(tmp_path / "m.gguf", return_tensors=True, model_to_load=model)
    ours = read_all(tmp_path / "m.gguf")
    theirs = theirs["tensors"]
    assert {files.hf_name(name) for name in ours} == set(theirs)
    for name, array in ours.items():
        np.testing.assert_array_equal(array, np.asarray(theirs[files.hf_name(name)]))


@pytest.mark.parametrize("seed", range(5))
def test_llama3_scaling_is_found_from_its_factors(seed):
    rng = np.random.default_rng(seed)
    known = [RopeScaling(8.0, 1.0, 4.0, 8192), RopeScaling(32.0, 1.0, 4.0, 8192), tiny.SCALING]
    drawn = RopeScaling(float(rng.integers(2, 40)), 1.0, float(rng.integers(2, 9)), 4096)
    for scaling in [*known, drawn]:
        config = files.llama_config(
            rope_scaling=scaling, rope_theta=500000.0, head_dim=int(rng.choice([64, 80, 128]))
        )
        factors = files.frequency_factors(config)
        found = rope_scaling(factors, config.rope_theta, config.head_dim)
        again = files.llama_config(
            rope_scaling=found, rope_theta=500000.0, head_dim=config.head_dim
        )
        np.testing.assert_allclose(files.frequency_factors(again), factors, rtol=1e-4)
        assert found == scaling or scaling is drawn


def test_other_scalings_are_refused():
    rng = np.random.default_rng(3)
    assert rope_scaling(np.full(32, 8.0), 500000.0, 64) is None
    assert rope_scaling(1 + rng.random(32), 500000.0, 64) is None
    assert rope_scaling(np.ones(7), 500000.0, 64) is None


def test_smollm2_is_known_by_its_shapes(smollm2_file, tmp_path):
    elsewhere = tmp_path / "renamed.gguf"
    elsewhere.symlink_to(smollm2_file)
    opened = weights.open_source(elsewhere)
    config = weights.choose_config(opened.config)
    preset = PRESETS["smollm2-135m"]
    assert (config.cross_layers, config.chunk_size) == (preset.cross_layers, preset.chunk_size)
    assert opened.config.text == preset.text
    assert weights.open_source("smollm2-135m").path == smollm2_file


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda w: w.add_string("general.architecture", "gemma2"), "'gemma2'"),
        (lambda w: w.add_expert_count(8), "mixture of experts"),
        (lambda w: w.add_uint16("split.count", 3), "one of 3 parts"),
        (lambda w: w.add_rope_scaling_type(gguf.RopeScalingType.YARN), "'yarn'"),
        (lambda w: w.add_rope_dimension_count(6), "rope.dimension_count"),
        (lambda w: w.add_head_count_kv([1, 2, 1, 2]), "head_count_kv"),
        (lambda w: w.kv_data[0].pop("llama.embedding_length"), "llama.embedding_length"),
        (lambda w: w.add_embedding_length(0), "positive"),
        (no_heads, "not a complete GGUF file"),
    ],
)
def test_what_is_not_a_llama_is_refused(tmp_path, change, words, caplog):
    config = files.llama_config()
    parameters = tiny.random_llama(np.random.default_rng(4), config)
    path = files.write_gguf(tmp_path / "model.gguf", config, parameters, metadata=change)
    with pytest.raises(RequestError, match=words):
        weights.open_source(path)


def test_damaged_files_are_refused(tmp_path):
    config = files.llama_config()
    parameters = tiny.random_llama(np.random.default_rng(5), config)
    path = files.write_gguf(tmp_path / "model.gguf", config, parameters)
    content = path.read_bytes()
    rng = np.random.default_rng(6)
    for length in [0, 3, 20, 100, *rng.integers(100, len(content) - 1, 20), len(content) - 40]:
        path.write_bytes(content[:length])
        with pytest.raises(RequestError, match="is not a complete GGUF file"):
            weights.open_source(path)
    # An array said to have 2 ** 60 elements must end at the end of the file, not of the memory.
    header = b"GGUF" + (3).to_bytes(4, "little") + (0).to_bytes(8, "little")
    header += (1).to_bytes(8, "little") + (1).to_bytes(8, "little") + b"k"
    header += (9).to_bytes(4, "little") + (0).to_bytes(4, "little") + (2**60).to_bytes(8, "little")
    path.write_bytes(header + bytes(100))
    with pytest.raises(RequestError, match="is not a complete GGUF file"):
        weights.open_source(path)
    (tmp_path / "model.bin").write_bytes(content)
    with pytest.raises(RequestError, match=r"not a \.gguf file"):
        weights.open_source(tmp_path / "model.bin")


def test_unknown_tensors_are_listed(tmp_path):
    config = files.llama_config()
    parameters = tiny.random_llama(np.random.default_rng(7), config)
    del parameters["decoder.layers.1.mlp.up_proj.weight"]
    extra = {"blk.0.attn_q.bias": np.ones(8, np.float32)}
    path = files.write_gguf(tmp_path / "model.gguf", config, parameters, extra=extra)
    with pytest.raises(RequestError, match="attn_q.bias") as error:
        weights.load(path)
    assert "decoder.layers.1.mlp.up_proj.weight" in str(error.value)


@pytest.mark.parametrize("unknown", [99, "x"])
def test_a_tokenizer_that_lies_is_refused(tmp_path, unknown):
    def metadata(writer):
        writer.add_tokenizer_model("llama")
        writer.add_token_list(["<unk>", "a"])
        writer.add_token_scores([0.0, 0.0])
        kind = gguf.GGUFValueType.get_type(unknown)
        writer.add_key_value("tokenizer.ggml.unknown_token_id", unknown, kind)

    config = files.llama_config()
    parameters = tiny.random_llama(np.random.default_rng(9), config)
    path = files.write_gguf(tmp_path / "model.gguf", config, parameters, metadata=metadata)
    source = weights.open_source(path)
    with pytest.raises(RequestError, match="not a complete GGUF file"):
        source.tokenizer()
