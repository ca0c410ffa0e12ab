"""Wrong requests get one sentence, and leave nothing behind."""

from __future__ import annotations

import errno
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections import namedtuple
from pathlib import Path

import numpy as np
import pytest
import safetensors.numpy

import convert_weights
from combkv_jax import weights
from combkv_jax.config import PRESETS
from combkv_jax.errors import RequestError
from tests import tiny
from tests.weights import files

ROOT = Path(__file__).parents[2]


@pytest.fixture
def checkpoint(tmp_path):
    """A Hugging Face folder, and its tensors by their names."""
    config = files.llama_config()
    parameters = tiny.random_llama(np.random.default_rng(1), config)
    tensors = {files.hf_name(n): a for n, a in parameters.items()}
    return files.write_hf(tmp_path / "hf", config, tensors), tensors


def left_over(tmp_path):
    return sorted(p.name for p in tmp_path.iterdir() if p.name not in ("hf", "shards"))


def refused(source, tmp_path, capsys, *arguments) -> str:
    """Runs the front door, which must refuse in one line; returns the line."""
    code = convert_weights.main([str(source), "--out", str(tmp_path / "out"), *arguments])
    out, err = capsys.readouterr()
    assert code == 2, err
    assert err.startswith("convert_weights.py: ") or ": " in err
    assert err.count("\n") == 1
    assert "Traceback" not in err
    assert left_over(tmp_path) == []
    return err


def change_config(folder, **changes):
    path = folder / "config.json"
    config = json.loads(path.read_text()) | changes
    path.write_text(json.dumps({k: v for k, v in config.items() if v != "gone"}))


@pytest.mark.parametrize("source", ["llama-9", "no/such/thing", "missing.gguf", "a/b.gguf", ""])
def test_unknown_names_list_the_presets(source, tmp_path, capsys):
    line = refused(source or "''", tmp_path, capsys)
    assert all(name in line for name in PRESETS)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"model_type": "mistral"}, "'mistral'"),
        ({"model_type": "gone"}, "only 'llama'"),
        ({"hidden_size": "gone"}, "lacks hidden_size"),
        ({"hidden_size": "forty"}, "hidden_size is 'forty'"),
        ({"text_config": 3, "model_type": "combllama", "cross_attention_layers": 3}, "cannot be"),
        ({"num_attention_heads": 0, "head_dim": None}, "cannot be understood"),
        ({"rope_theta": 10**400}, "cannot be understood"),
        ({"hidden_size": 0}, "positive"),
        ({"num_key_value_heads": 3}, "multiple"),
        ({"attention_bias": True}, "attention_bias"),
        ({"rope_scaling": {"rope_type": "yarn"}}, "yarn"),
        ({"rope_theta": "gone"}, "rope_theta"),
        ({"num_hidden_layers": 10**9}, "only 39 tensors"),
        ({"num_hidden_layers": 3}, "unknown: model.layers.3.input_layernorm.weight"),
        ({"num_hidden_layers": 5}, "missing: decoder.layers.4.input_layernorm.weight"),
        ({"vocab_size": 98}, r"model.embed_tokens.weight [97, 40] not [98, 40]"),
    ],
)
def test_configs_that_do_not_fit(changes, words, checkpoint, tmp_path, capsys):
    change_config(checkpoint[0], **changes)
    assert words in refused(checkpoint[0], tmp_path, capsys)


@pytest.mark.parametrize("text", [None, "", "[1]", "{", b"\xff\xfe{}", "[" * 10**6, "9" * 5000])
def test_config_json_must_be_there_and_json(text, checkpoint, tmp_path, capsys):
    path = checkpoint[0] / "config.json"
    path.unlink()
    if text is not None:
        path.write_bytes(text.encode() if isinstance(text, str) else text)
    assert "config.json" in refused(checkpoint[0], tmp_path, capsys)


def test_all_problems_at_once_and_harmless_extras(checkpoint, tmp_path, capsys):
    folder, tensors = checkpoint
    good = dict(tensors)
    good["model.layers.0.self_attn.rotary_emb.inv_freq"] = np.ones(6, np.float32)
    safetensors.numpy.save_file(good, folder / "model.safetensors")
    weights.load(folder)
    bad = dict(good)
    del bad["model.layers.1.mlp.up_proj.weight"], bad["model.norm.weight"]
    bad["model.layers.0.self_attn.q_proj.bias"] = np.ones(3, np.float32)
    bad["score.weight"] = np.ones((2, 3), np.float32)
    bad["model.layers.2.self_attn.k_proj.weight"] = np.ones((7, 5), np.float32)
    safetensors.numpy.save_file(bad, folder / "model.safetensors")
    line = refused(folder, tmp_path, capsys)
    for words in (
        "missing: decoder.layers.1.mlp.up_proj.weight, decoder.norm.weight;",
        "unknown: model.layers.0.self_attn.q_proj.bias, score.weight;",
        "model.layers.2.self_attn.k_proj.weight [7, 5] not [24, 40]",
    ):
        assert words in line
    assert "inv_freq" not in line
    with pytest.raises(RequestError, match=r"score\.weight"):
        weights.load(folder)


def test_a_stored_copy_of_a_tied_head_is_accepted(checkpoint):
    change_config(checkpoint[0], tie_word_embeddings=True)
    _, arrays, _ = weights.load(checkpoint[0])
    assert "decoder.lm_head.weight" not in arrays


def test_truncated_safetensors(checkpoint, tmp_path, capsys):
    path = checkpoint[0] / "model.safetensors"
    content = path.read_bytes()
    rng = np.random.default_rng(2)
    for length in [0, 7, 8, 100, *rng.integers(100, len(content), 8), len(content) - 1]:
        path.write_bytes(content[:length])
        line = refused(checkpoint[0], tmp_path, capsys)
        assert "not a complete safetensors" in line or "truncated" in line


@pytest.mark.parametrize(
    ("entry", "words"),
    [
        ({"dtype": "F8_E4M3", "shape": [4], "data_offsets": [0, 4]}, "F8_E4M3"),
        ({"dtype": "F32", "shape": [4], "data_offsets": [0, 4]}, "not F32 [4]"),
        ({"dtype": "F32", "shape": [1], "data_offsets": [-4, 0]}, "truncated"),
        ({"dtype": "F32", "shape": [10**12], "data_offsets": [0, 4 * 10**12]}, "truncated"),
        ({"dtype": "F32", "shape": [-1, -1], "data_offsets": [0, 4]}, "not F32"),
        ({"dtype": "F32", "shape": ["x"], "data_offsets": [0, 4]}, "unreadable"),
        ({"dtype": "F32"}, "unreadable"),
        ({"dtype": "F32", "shape": [1e999], "data_offsets": [0, 4]}, "unreadable"),
        ({"dtype": "F32", "shape": [4], "data_offsets": [0, 16, 32]}, "unreadable"),
        ({"dtype": ["F32"], "shape": [4], "data_offsets": [0, 16]}, "can be read"),
        ({"dtype": "F32", "shape": [3], "data_offsets": [0, 12]}, "4 bytes after its last"),
        ({"dtype": "F32", "shape": [3], "data_offsets": [4, 16]}, "starts at byte 4"),
        (["F32"], "unreadable"),
    ],
)
def test_headers_that_lie(entry, words, checkpoint, tmp_path, capsys):
    text = json.dumps({"model.norm.weight": entry}).encode()
    path = checkpoint[0] / "model.safetensors"
    path.write_bytes(len(text).to_bytes(8, "little") + text + bytes(16))
    assert words in refused(checkpoint[0], tmp_path, capsys)
    path.write_bytes((10**15).to_bytes(8, "little") + text)
    assert "header of" in refused(checkpoint[0], tmp_path, capsys)


def test_tensors_that_overlap_and_headers_too_deep(checkpoint, tmp_path, capsys):
    path = checkpoint[0] / "model.safetensors"
    entry = {"dtype": "F32", "shape": [3]}
    header = {"a": entry | {"data_offsets": [0, 12]}, "b": entry | {"data_offsets": [4, 16]}}
    for text, words in [
        (json.dumps(header), "tensor b"),
        ("[" * 10**6, "unreadable"),
        ("9" * 5000, "unreadable"),
    ]:
        path.write_bytes(len(text).to_bytes(8, "little") + text.encode() + bytes(16))
        assert words in refused(checkpoint[0], tmp_path, capsys)


def test_an_index_stays_in_its_folder(tmp_path, capsys):
    config = files.llama_config()
    parameters = tiny.random_llama(np.random.default_rng(3), config)
    tensors = {files.hf_name(n): a for n, a in parameters.items()}
    folder = files.write_hf(tmp_path / "hf", config, tensors, shards=3)
    index = folder / "model.safetensors.index.json"
    good = json.loads(index.read_text())
    shutil.copy(folder / "model-00001-of-00003.safetensors", tmp_path / "shards")
    for name in ("../shards", str(tmp_path / "shards"), "sub/../../shards"):
        bad = {"weight_map": good["weight_map"] | {"model.norm.weight": name}}
        files.write_json(index, bad)
        assert "only files in its own folder" in refused(folder, tmp_path, capsys)
    files.write_json(index, {"weight_map": good["weight_map"] | {"x": "gone.safetensors"}})
    assert "lacks gone.safetensors" in refused(folder, tmp_path, capsys)
    wrong = {"model.norm.weight": "model-00001-of-00003.safetensors", "nothing": "model-00001"}
    wrong["nothing"] = "model-00001-of-00003.safetensors"
    files.write_json(index, {"weight_map": good["weight_map"] | wrong})
    assert "nothing" in refused(folder, tmp_path, capsys)
    for text in ("{", "[]", '{"weight_map": 3}', "[" * 10**6, "9" * 5000):
        index.write_text(text)
        assert "index" in refused(folder, tmp_path, capsys)


def test_no_safetensors(checkpoint, tmp_path, capsys):
    (checkpoint[0] / "model.safetensors").rename(checkpoint[0] / "pytorch_model.bin")
    line = refused(checkpoint[0], tmp_path, capsys)
    assert "pytorch_model.bin is a pickle" in line


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--kept-layers", "3,x"], "'3,x'"),
        (["--kept-layers", ""], "''"),
        (["--kept-layers", "3,4"], "within 0..3"),
        (["--kept-layers", "1,1"], "without repeats"),
        (["--encoder", "other"], "other"),
        (["--dtype", "int8"], "int8"),
        (["--to-hf", "elsewhere"], "--to-hf"),
    ],
)
def test_arguments(arguments, words, checkpoint, tmp_path, capsys):
    assert words in refused(checkpoint[0], tmp_path, capsys, *arguments)


def test_a_history_is_kept_as_it_is(tmp_path, capsys):
    config = files.comb_config("tanh")
    parameters = files.random_parameters(np.random.default_rng(4), config)
    source = files.write_combllama(tmp_path / "hf", config, parameters)
    line = refused(source, tmp_path, capsys, "--kept-layers", "every4")
    assert "already has a history" in line


def test_output_folders(checkpoint, tmp_path, capsys):
    source, out = checkpoint[0], tmp_path / "out"
    assert convert_weights.main([str(source), "--out", str(out), "--kept-layers", "1"]) == 0
    before = (out / "config.json").read_text()
    capsys.readouterr()
    assert convert_weights.main([str(source), "--out", str(out)]) == 2
    assert "--overwrite" in capsys.readouterr().err
    assert (out / "config.json").read_text() == before
    again = [str(source), "--out", str(out), "--overwrite", "--kept-layers", "2"]
    assert convert_weights.main(again) == 0
    assert weights.load(out)[0].cross_layers == (2,)
    assert left_over(tmp_path) == ["out"]
    # Never over the source, nor over what is not a model.
    capsys.readouterr()
    for target in (source, tmp_path):
        assert convert_weights.main([str(source), "--out", str(target), "--overwrite"]) == 2
        assert "the source itself" in capsys.readouterr().err
    (tmp_path / "letters").mkdir()
    (tmp_path / "letters" / "diary.txt").write_text("mine")
    (tmp_path / "project").mkdir()
    (tmp_path / "project" / "config.json").write_text('{"editor": "mine"}')
    for name in ("letters", "letters/diary.txt", "project"):
        target = tmp_path / name
        assert convert_weights.main([str(source), "--out", str(target), "--overwrite"]) == 2
        assert str(target) in capsys.readouterr().err
    assert (tmp_path / "letters" / "diary.txt").read_text() == "mine"
    assert (tmp_path / "project" / "config.json").read_text() == '{"editor": "mine"}'


def test_a_small_disk_is_refused_before_writing(checkpoint, tmp_path, capsys, monkeypatch):
    usage = namedtuple("usage", "total used free")
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage(2**40, 2**40 - 1000, 1000))
    assert "free some space" in refused(checkpoint[0], tmp_path, capsys)


@pytest.mark.parametrize(
    "error",
    [
        OSError(errno.ENOSPC, os.strerror(errno.ENOSPC)),
        ValueError(f"RESOURCE_EXHAUSTED: Error writing: {os.strerror(errno.ENOSPC)}"),
    ],
)
def test_a_disk_that_fills_up(error, checkpoint, tmp_path, capsys, monkeypatch):
    def fail(*args, **kwargs):
        raise error

    monkeypatch.setattr("orbax.checkpoint.Checkpointer.save", fail)
    assert "the disk became full" in refused(checkpoint[0], tmp_path, capsys)


def test_a_disk_that_shrinks_meanwhile(checkpoint, tmp_path, capsys, monkeypatch):
    usage = namedtuple("usage", "total used free")
    free = iter([2**40] * 3 + [1000] * 9)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage(2**40, 0, next(free)))
    assert "the disk became full" in refused(checkpoint[0], tmp_path, capsys)


_SLOW = """
import sys, time
from combkv_jax import weights

def say(line):
    print(line, flush=True)
    time.sleep(0.05)

weights.convert(sys.argv[1], sys.argv[2], say=say)
"""


def test_a_killed_conversion_leaves_nothing_that_loads(checkpoint, tmp_path):
    out = tmp_path / "out"
    process = subprocess.Popen(
        [sys.executable, "-c", _SLOW, str(checkpoint[0]), str(out)],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        text=True,
    )
    with process:
        for _ in range(12):
            assert process.stdout.readline()
        with pytest.raises(RequestError, match="is being written by another process"):
            weights.convert(checkpoint[0], out)
        process.send_signal(signal.SIGKILL)
    assert not out.exists()
    (partial,) = tmp_path.glob(".out.partial")
    assert any(partial.rglob("*"))
    with pytest.raises(RequestError, match=r"no config\.json"):
        weights.load(partial)
    with pytest.raises(RequestError, match="no file or folder"):
        weights.load(out)
    weights.convert(checkpoint[0], out)  # the next attempt cleans up
    assert left_over(tmp_path) == ["out"]


def test_the_old_model_outlives_a_kill_between_the_renames(checkpoint, tmp_path, capsys):
    source, out, old = checkpoint[0], tmp_path / "out", tmp_path / ".out.old"
    weights.convert(source, out, kept_layers=[1])
    out.rename(old)  # and there it was killed
    with pytest.raises(RequestError, match="exists"):
        weights.convert(source, out)
    assert weights.load(out)[0].cross_layers == (1,)
    out.rename(old)

    def fail(line):
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        weights.convert(source, out, kept_layers=[2], overwrite=True, say=fail)
    assert weights.load(out)[0].cross_layers == (1,)
    out.rename(old)
    weights.convert(source, out, kept_layers=[2], overwrite=True)
    assert weights.load(out)[0].cross_layers == (2,)
    assert left_over(tmp_path) == ["out"]


def test_the_old_model_outlives_a_rename_that_fails(checkpoint, tmp_path, monkeypatch):
    out, rename = tmp_path / "out", Path.rename
    weights.convert(checkpoint[0], out, kept_layers=[1])

    def fail(self, target):
        if self.name == ".out.partial":
            raise PermissionError(errno.EACCES, "no")
        return rename(self, target)

    monkeypatch.setattr(Path, "rename", fail)
    with pytest.raises(PermissionError):
        weights.convert(checkpoint[0], out, kept_layers=[2], overwrite=True)
    assert weights.load(out)[0].cross_layers == (1,)
    assert left_over(tmp_path) == ["out"]


def test_a_history_that_is_missing(checkpoint, tmp_path, capsys):
    weights.convert(checkpoint[0], tmp_path / "native", kept_layers=[1])
    shutil.rmtree(checkpoint[0])
    weights.export(tmp_path / "native", checkpoint[0])
    shutil.rmtree(tmp_path / "native")
    (checkpoint[0] / "history.safetensors").unlink()
    assert "history.safetensors is missing" in refused(checkpoint[0], tmp_path, capsys)


def test_damaged_native_folders(checkpoint, tmp_path):
    out = tmp_path / "out"
    weights.convert(checkpoint[0], out)
    shutil.rmtree(out / "weights" / "decoder.layers.2")
    with pytest.raises(RequestError, match=r"decoder\.layers\.2 is missing"):
        weights.load(out)
    shutil.copytree(out / "weights" / "decoder.layers.1", out / "weights" / "decoder.layers.2")
    with pytest.raises(RequestError, match="not a complete checkpoint"):
        weights.load(out)
    weights.convert(checkpoint[0], out, overwrite=True)
    for path in (out / "weights" / "decoder.layers.1").rglob("*"):
        if path.is_file() and path.stat().st_size > 2000:
            path.write_bytes(path.read_bytes()[:1000])
    with pytest.raises(RequestError, match="not a complete checkpoint"):
        weights.load(out)
    change_config(out, format_version=99)
    with pytest.raises(RequestError, match="format_version is 99"):
        weights.load(out)
    change_config(out, format_version=1)
    (out / "weights" / "tensors.json").write_text("{}")
    with pytest.raises(RequestError, match="only 0 tensors"):
        weights.load(out)


def test_shards_need_torch_all_ranks_and_nothing_but_tensors(tmp_path, capsys, monkeypatch):
    torch = pytest.importorskip("torch", reason="torch (to write pickles) is not installed")
    config = files.comb_config("tanh")
    parameters = files.random_parameters(np.random.default_rng(5), config)
    folder = files.write_combllama(tmp_path / "hf", config, parameters)
    (folder / "model.safetensors").unlink()
    state = {files.combllama_name(n): torch.tensor(a) for n, a in parameters.items()}
    shard = folder / "tp_rank_0.pt"
    torch.save({"model_state_dict": state, "tp_size": 2}, shard)
    assert "all ranks must be there" in refused(folder, tmp_path, capsys)
    odd = {"model_state_dict": state | {"language_model.model.norm.weight": torch.ones(3)}}
    torch.save(odd | {"tp_size": 1}, shard)
    assert "[3] not [40]" in refused(folder, tmp_path, capsys)
    torch.save({"model_state_dict": state, "tp_size": 1, "run": time.sleep}, shard)
    assert "not a complete tensor-parallel shard" in refused(folder, tmp_path, capsys)
    torch.save({"other": 1}, shard)
    assert "model_state_dict" in refused(folder, tmp_path, capsys)
    shard.write_bytes(b"PK\x03\x04 not a pickle")
    assert "not a complete tensor-parallel shard" in refused(folder, tmp_path, capsys)
    monkeypatch.setitem(sys.modules, "torch", None)
    assert "pip install torch" in refused(folder, tmp_path, capsys)


def test_the_hub(tmp_path, capsys, monkeypatch):
    import huggingface_hub
    from huggingface_hub import errors

    def answer(kind):  # without a response of whichever HTTP package this version uses
        return kind.__new__(kind, "no")

    cases = [
        (answer(errors.GatedRepoError), "hf auth login"),
        (answer(errors.RepositoryNotFoundError), "hf auth login"),
        (answer(errors.HfHubHTTPError), "check the network"),
        (ConnectionError("no route to host"), "no route to host"),
        (RuntimeError("timed out"), "check the network"),
        (errors.LocalEntryNotFoundError("offline"), "check the network"),
        (errors.OfflineModeIsEnabled("offline mode"), "check the network"),
    ]
    for error, words in cases:

        def fail(*args, error=error, **kwargs):
            raise error

        monkeypatch.setattr(huggingface_hub, "snapshot_download", fail)
        for source in ("llama-3.1-8b", "someone/some-llama"):
            line = refused(source, tmp_path, capsys)
            assert words in line
            assert "folder" in line

    # What comes is a folder like any other; only what is needed is asked for.
    config = files.llama_config()
    parameters = tiny.random_llama(np.random.default_rng(6), config)
    tensors = {files.hf_name(n): a for n, a in parameters.items()}
    folder = files.write_hf(tmp_path / "hf", config, tensors)
    asked = []

    def download(repo_id, allow_patterns):
        asked.append((repo_id, allow_patterns))
        return str(folder)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", download)
    weights.load("llama-3.2-1b")
    weights.load("someone/some-llama")
    assert [a[0] for a in asked] == ["meta-llama/Llama-3.2-1B", "someone/some-llama"]
    assert not any("bin" in pattern for pattern in asked[0][1])

    # A config needs no weights, and none at all where the shapes are known.
    own = weights.convert(folder, tmp_path / "native", kept_layers=[2])
    weights.export(tmp_path / "native", tmp_path / "back")
    (folder / "model.safetensors").unlink()
    asked.clear()
    lines = []
    made = weights.read_source_config("llama-3.2-1b", lines.append)
    assert (made.text, made.cross_layers) == (config, (3,))
    assert len(lines) == 1  # nothing was measured
    (tmp_path / "back" / "model.safetensors").unlink()
    folder = tmp_path / "back"
    assert weights.read_source_config("someone/some-llama") == own
    assert [a[1] for a in asked] == [["*.json"], ["*.json"]]
    for name in ("llama-3.1-8b", "smollm2-135m"):
        assert weights.read_source_config(name).text == PRESETS[name].text
    assert weights.read_source_config(tmp_path / "native") == own
    assert len(asked) == 2


def test_no_network_for_real(tmp_path, capsys):
    """The hub's client in offline mode (tests/conftest.py), not a stand-in."""
    line = refused("someone/some-llama-that-is-not-cached", tmp_path, capsys)
    assert "could not be fetched" in line
