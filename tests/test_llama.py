"""A plain Llama against transformers, in float32: random tiny ones, and the small real one."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest

import combkv_jax
from combkv_jax.config import LlamaConfig, plain
from combkv_jax.evaluation import tasks
from tests import tiny

torch = pytest.importorskip("torch", reason="transformers' Llama, the oracle here, needs torch")
transformers = pytest.importorskip("transformers")


def transformers_logits(reference, samples):
    """Logits [total, V] of each sample alone."""
    with torch.no_grad():
        return np.concatenate(
            [reference(torch.tensor(ids, dtype=torch.long)[None]).logits[0] for ids in samples]
        )


@pytest.mark.parametrize("scaling", [None, tiny.SCALING], ids=["plain", "llama3"])
@pytest.mark.parametrize("tied", [False, True], ids=["untied", "tied"])
@pytest.mark.parametrize("kv_heads", [1, 2, 6], ids=["kv1", "kv2", "kv6"])
def test_random_llamas(kv_heads, tied, scaling):
    """Two samples in one pack; 6 heads of 10 in a model 36 wide; past the original length of the
    rotary scaling."""
    config = tiny.llama_config(
        num_hidden_layers=2,
        hidden_size=36,
        num_attention_heads=6,
        num_key_value_heads=kv_heads,
        head_dim=10,
        tie_word_embeddings=tied,
        rope_scaling=scaling,
    )
    rng = np.random.default_rng(kv_heads)
    parameters = tiny.random_llama(rng, config)
    samples = [rng.integers(0, config.vocab_size, n) for n in (83, 7)]

    hf_config = transformers.LlamaConfig(**config.to_hf())
    assert LlamaConfig.from_hf(hf_config.to_dict()) == config
    reference = transformers.LlamaForCausalLM(hf_config).eval()
    tiny.load_into_transformers(reference, parameters)
    batch = {"input_ids": np.concatenate(samples)[None], "cu_seqlens_q": np.array([0, 83, 90])}
    logits = tiny.logits(tiny.build(plain(config), parameters), batch)
    expected = transformers_logits(reference, samples)
    np.testing.assert_allclose(logits, expected, rtol=0, atol=1e-4)


@pytest.mark.optimized
def test_smollm2_from_its_gguf_file(smollm2_file):
    """600 tokens of a novel; transformers reads config and weights from the same file."""
    from transformers.modeling_gguf_pytorch_utils import load_gguf_checkpoint

    model = combkv_jax.load(smollm2_file, dtype="float32")
    config = model.config.text
    reference = transformers.LlamaForCausalLM(transformers.LlamaConfig(**config.to_hf())).eval()
    read = load_gguf_checkpoint(smollm2_file, return_tensors=True, model_to_load=reference)
    theirs = LlamaConfig.from_hf(transformers.LlamaConfig(**read["config"]).to_dict())
    # The file keeps its numbers in float32.
    assert dataclasses.asdict(config) == pytest.approx(dataclasses.asdict(theirs))
    missing, unknown = reference.load_state_dict(read["tensors"], strict=False)
    assert not unknown
    assert missing in ([], ["lm_head.weight"])  # tied
    reference.tie_weights()

    ids = model.tokens(tasks.bundled_text()[:4000])[:600]
    assert len(ids) == 600
    logits = model({"input_ids": ids, "cu_seqlens_q": np.array([0, 600])})
    expected = transformers_logits(reference, [ids])
    np.testing.assert_allclose(logits, expected, rtol=0, atol=1e-3)
