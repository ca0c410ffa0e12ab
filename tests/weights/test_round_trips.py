"""What goes in comes out, bit for bit, and what is new starts as it should."""

from __future__ import annotations

import json
import shutil

import jax
import numpy as np
import pytest
import safetensors.numpy
from jax.sharding import NamedSharding, PartitionSpec

from combkv_jax import weights
from combkv_jax.config import PRESETS, CombConfig, plain
from combkv_jax.model import declarations
from combkv_jax.weights import huggingface
from combkv_jax.weights.source import BFLOAT16
from tests import tiny
from tests.weights import files


def hf_tensors(folder):
    """What a folder holds, read with the safetensors package (bfloat16 as raw bits)."""
    return {n: t.read(np.dtype(t.stored)) for n, t in huggingface.open_tensors(folder).items()}


@pytest.mark.parametrize(
    ("heads", "kv_heads", "tied", "shards", "dtype"),
    [(4, 1, True, 1, "float32"), (5, 5, False, 3, "float32"), (6, 2, False, 2, "bfloat16")],
)
def test_hugging_face(tmp_path, heads, kv_heads, tied, shards, dtype):
    config = files.llama_config(
        num_attention_heads=heads, num_key_value_heads=kv_heads, tie_word_embeddings=tied
    )
    parameters = tiny.random_llama(np.random.default_rng(heads), config)
    if dtype == "bfloat16":
        parameters = files.to_bfloat16(parameters)
    tensors = {files.hf_name(n): a for n, a in parameters.items()}
    source = files.write_hf(tmp_path / "hf", config, tensors, shards)
    (source / "generation_config.json").write_text('{"eos_token_id": [3, 5]}')

    made = weights.convert(source, tmp_path / "native", dtype, kept_layers="1,3")
    assert (made.text, made.encoder, made.cross_layers) == (config, "decoder", (1, 3))
    loaded, arrays, tokenizer = weights.load(tmp_path / "native")
    assert loaded == made
    assert tokenizer is None
    decoder = {n: a for n, a in arrays.items() if n.startswith("decoder.")}
    files.assert_equal(decoder, parameters)

    weights.export(tmp_path / "native", tmp_path / "back")
    files.assert_equal(hf_tensors(tmp_path / "back"), tensors)
    for name in ("back", "native"):
        kept = (tmp_path / name / "generation_config.json").read_text()
        assert kept == '{"eos_token_id": [3, 5]}'

    # The history lies beside it, and is read again.
    again, from_back, _ = weights.load(tmp_path / "back")
    assert again == made
    files.assert_equal(from_back, {n: np.asarray(a) for n, a in arrays.items()})


def test_transformers_reads_an_exported_folder(tmp_path):
    torch = pytest.importorskip("torch", reason="torch (the oracle) is not installed")
    from transformers import LlamaForCausalLM

    config = files.llama_config(tie_word_embeddings=True)
    parameters = tiny.random_llama(np.random.default_rng(1), config)
    tensors = {files.hf_name(n): a for n, a in parameters.items()}
    files.write_hf(tmp_path / "hf", config, tensors)
    weights.convert(tmp_path / "hf", tmp_path / "native", "float32", kept_layers=[2])
    weights.export(tmp_path / "native", tmp_path / "back")
    model, info = LlamaForCausalLM.from_pretrained(tmp_path / "back", output_loading_info=True)
    assert not info["missing_keys"]
    assert not info["unexpected_keys"]
    ids = np.random.default_rng(2).integers(0, config.vocab_size, (1, 19))
    with torch.no_grad():
        theirs = model(torch.tensor(ids)).logits[0].numpy()
    batch = {"input_ids": ids, "cu_seqlens_q": np.array([0, 19])}
    _, arrays, _ = weights.load(tmp_path / "native")
    ours = tiny.logits(tiny.build(plain(config), {n: arrays[n] for n in parameters}), batch)
    np.testing.assert_allclose(ours, theirs, atol=1e-4)


@pytest.mark.parametrize("encoder", ["decoder", "layers"])
def test_a_plain_llama_s_new_history_starts_as_copies(tmp_path, encoder):
    config = files.llama_config()
    parameters = tiny.random_llama(np.random.default_rng(3), config)
    tensors = {files.hf_name(n): a for n, a in parameters.items()}
    files.write_hf(tmp_path / "hf", config, tensors)
    options = {"encoder": encoder, "kept_layers": "0, 2"}
    made = weights.convert(tmp_path / "hf", tmp_path / "native", "float32", **options)
    direct, at_once, _ = weights.load(tmp_path / "hf", **options)
    assert direct == made
    _, arrays, _ = weights.load(tmp_path / "native")
    files.assert_equal(at_once, {n: np.asarray(a) for n, a in arrays.items()})
    assert sorted(arrays) == sorted(declarations(made))
    if encoder == "decoder":
        expected = tiny.untrained(made, parameters)
        drawn = {n for n in expected if ".summary." in n and n.endswith(".weight")}
        kept = {n: a for n, a in arrays.items() if n not in drawn}
        files.assert_equal(kept, {n: a for n, a in expected.items() if n not in drawn})
        for name in drawn:  # of their own numbers, as large as declared
            spread = np.std(arrays[name]) * arrays[name].shape[-1] ** 0.5
            assert spread == pytest.approx(1, abs=0.15), name
    else:
        for i, layer in enumerate((0, 2)):
            for tail in ("self_attn.q_proj", "mlp.down_proj", "input_layernorm"):
                expected = parameters[f"decoder.layers.{layer}.{tail}.weight"]
                np.testing.assert_array_equal(arrays[f"encoder.layers.{i}.{tail}.weight"], expected)
            for part in "kv":
                expected = parameters[f"decoder.layers.{layer}.self_attn.{part}_proj.weight"]
                np.testing.assert_array_equal(arrays[f"encoder.{part}_proj.{i}.weight"], expected)
            q_proj = parameters[f"decoder.layers.{layer}.self_attn.q_proj.weight"]
            np.testing.assert_array_equal(arrays[f"history.{i}.cross_attn.q_proj.weight"], q_proj)
            assert np.all(np.asarray(arrays[f"history.{i}.cross_attn.k_norm.weight"]) == 1)
            assert np.all(np.asarray(arrays[f"history.{i}.cross_attn_attn_gate"]) == 0)


def check_combllama(source, tmp_path, parameters):
    """CombLlama -> native -> CombLlama; parameters by our names, or None to trust the file."""
    before = safetensors.numpy.load_file(source / "model.safetensors")
    made = weights.convert(source, tmp_path / "native", "float32")
    assert (made.encoder, made.gate) == ("layers", "tanh")
    _, arrays, _ = weights.load(tmp_path / "native")
    if parameters is None:
        parameters = {
            tiny.from_combllama_name(n): a
            for n, a in before.items()
            if "chunk_model.embed" not in n
        }
    files.assert_equal(arrays, parameters)
    _, direct, _ = weights.load(source)
    files.assert_equal(direct, parameters)
    weights.export(tmp_path / "native", tmp_path / "back")
    after = safetensors.numpy.load_file(tmp_path / "back/model.safetensors")
    files.assert_equal(after, before)
    config = json.loads((tmp_path / "back/config.json").read_text())
    assert config["model_type"] == "combllama"
    assert CombConfig.from_json(config) == made


@pytest.mark.parametrize("tied", [True, False])
def test_combllama(tmp_path, tied):
    config = files.comb_config("tanh", num_attention_heads=6, tie_word_embeddings=tied)
    parameters = files.random_parameters(np.random.default_rng(4), config)
    source = files.write_combllama(tmp_path / "source", config, parameters)
    check_combllama(source, tmp_path, parameters)


def test_the_reference_combllama(tmp_path, golden_folder):
    check_combllama(golden_folder, tmp_path, None)


@pytest.mark.parametrize(("ranks", "dtype"), [(1, "float32"), (2, "bfloat16"), (4, "float32")])
def test_tensor_parallel_shards(tmp_path, ranks, dtype):
    torch = pytest.importorskip("torch", reason="torch (to write pickles) is not installed")
    config = files.comb_config("tanh", num_attention_heads=8, num_key_value_heads=4, vocab_size=96)
    parameters = files.random_parameters(np.random.default_rng(5), config)
    folder = files.write_combllama(tmp_path / "run", config, parameters)
    (folder / "model.safetensors").unlink()
    (folder / "shards").mkdir()
    rows = ("q_proj", "k_proj", "v_proj", "gate_proj", "up_proj", "lm_head")
    for rank in range(ranks):
        state = {}
        for name, array in parameters.items():
            part = [p for p in name.split(".") if not p.isdecimal()][-2]
            if part in rows:
                array = np.split(array, ranks, axis=0)[rank]
            elif part in ("o_proj", "down_proj"):
                array = np.split(array, ranks, axis=1)[rank]
            tensor = torch.tensor(array).to(getattr(torch, dtype))
            state[files.combllama_name(name)] = tensor
        state["chunk_model.embed_tokens.weight"] = state["language_model.model.embed_tokens.weight"]
        content = {"model_state_dict": state, "tp_size": ranks, "step": 7}
        torch.save(content, folder / "shards" / f"tp_rank_{rank}.pt")
    if dtype == "bfloat16":
        parameters = files.to_bfloat16(parameters)
    weights.convert(folder / "shards", tmp_path / "native", dtype)
    _, arrays, _ = weights.load(tmp_path / "native")
    files.assert_equal(arrays, parameters)


@pytest.mark.parametrize("gate", ["lse", "tanh"])
def test_native_goes_onto_any_devices(tmp_path, gate):
    config = files.comb_config(gate, vocab_size=96)
    parameters = files.random_parameters(np.random.default_rng(6), config)
    if gate == "tanh":
        source = files.write_combllama(tmp_path / "source", config, parameters)
        weights.convert(source, tmp_path / "native")
    else:
        llama = {n: a for n, a in parameters.items() if n.startswith("decoder.")}
        tensors = {files.hf_name(n): a for n, a in llama.items()}
        source = files.write_hf(tmp_path / "source", config.text, tensors)
        weights.convert(source, tmp_path / "native", kept_layers=config.cross_layers)
    mesh = jax.make_mesh((4,), ("tensor",), axis_types=(jax.sharding.AxisType.Auto,))
    split = NamedSharding(mesh, PartitionSpec("tensor"))
    whole = NamedSharding(mesh, PartitionSpec())

    def shardings(config):
        shapes = {n: d.shape for n, d in declarations(config).items()}
        return {n: whole if shape[0] % 4 else split for n, shape in shapes.items()}

    _, one, _ = weights.load(tmp_path / "native")
    for path in (tmp_path / "native", source):
        options = {} if gate == "tanh" or path != source else {"kept_layers": (1, 3)}
        made, many, _ = weights.load(path, "bfloat16", shardings=shardings, **options)
        for name, sharding in shardings(made).items():
            assert many[name].sharding.is_equivalent_to(sharding, many[name].ndim)
        files.assert_equal(many, {n: np.asarray(a) for n, a in one.items()})
    # Another dtype is a matter of loading; the scalars of our form stay float32.
    _, wide, _ = weights.load(tmp_path / "native", "float32")
    for name, array in wide.items():
        assert array.dtype == np.float32
        np.testing.assert_array_equal(array, np.asarray(one[name]).astype(np.float32))
    assert {np.asarray(a).dtype for n, a in one.items() if n.endswith("weight")} == {BFLOAT16}


def test_shard_files_stay_under_their_limit(tmp_path):
    config = files.llama_config()
    parameters = tiny.random_llama(np.random.default_rng(7), config)
    layout = {files.hf_name(n): (a.shape, a.dtype) for n, a in parameters.items()}
    arrays = {files.hf_name(n): a for n, a in parameters.items()}
    mapping = config.to_hf()
    huggingface.write_folder(
        tmp_path, mapping, layout, arrays.__getitem__, lambda name: None, shard_bytes=30_000
    )
    shards = sorted(tmp_path.glob("*.safetensors"))
    assert len(shards) > 3
    assert all(s.stat().st_size < 36_000 for s in shards)
    together = {}
    for shard in shards:  # the safetensors package reads them
        together |= safetensors.numpy.load_file(shard)
    files.assert_equal(together, arrays)
    files.assert_equal(hf_tensors(tmp_path), arrays)


def test_smollm2_from_its_gguf(tmp_path, smollm2_file):
    lines = []
    weights.convert(smollm2_file, tmp_path / "native", say=lines.append)
    config, arrays, tokenizer = weights.load(tmp_path / "native")
    assert len(lines) == len(arrays)
    assert "token_embd.weight Q8_0 -> decoder.embed_tokens.weight bfloat16 49152x576" in lines
    assert config.cross_layers == PRESETS["smollm2-135m"].cross_layers
    opened = weights.open_source(smollm2_file)
    own = opened.tokenizer()
    for name in ("decoder.layers.17.self_attn.k_proj.weight", "decoder.embed_tokens.weight"):
        files.assert_equal({name: arrays[name]}, {name: opened.tensors[name].read(BFLOAT16)})
    text = "Room 101: <|im_end|>\n"
    assert tokenizer(text).input_ids == own(text).input_ids
    assert tokenizer.chat_template == own.chat_template
    shutil.rmtree(tmp_path / "native")  # large, and pytest keeps folders for three runs
