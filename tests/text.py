"""A tokenizer of one token a byte, and tiny models that speak it."""

from __future__ import annotations

import numpy as np
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from combkv_jax.language_model import LanguageModel
from tests import tiny

TEMPLATE = (
    "{% for m in messages %}<{{ m['role'] }}>{{ m['content'] }}<|im_end|>{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)


def byte_tokenizer(template: str | None = TEMPLATE) -> PreTrainedTokenizerFast:
    """Vocabulary: 256 bytes, and 256 = <|im_end|>."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE({c: i for i, c in enumerate(alphabet)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    wrapped = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<|im_end|>")
    wrapped.chat_template = template
    return wrapped


def byte_model(form: str, seed: int, template: str | None = TEMPLATE, **changes) -> LanguageModel:
    """A random model of that form with the byte tokenizer."""
    config = tiny.comb_config(form, vocab_size=257, **changes)
    parameters = tiny.random_parameters(np.random.default_rng(seed), config)
    return LanguageModel(tiny.build(config, parameters), byte_tokenizer(template))
