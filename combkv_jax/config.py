"""Frozen descriptions of a model: the Llama decoder, and how its history is compressed."""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from combkv_jax.errors import RequestError

MOST_CHUNK_TOKENS = 2**20
MOST_SINK_TOKENS = 1024
MOST_SUMMARY_TOKENS = 1024
FORMAT_VERSION = 1  # of native folders; raised when an older reader would misread a newer folder


def _check_whole(name: str, value: Any) -> None:
    if not isinstance(value, int) or isinstance(value, bool):
        raise RequestError(f"{name} is {value!r}; it must be a whole number.")


def _check_numbers(config: RopeScaling | LlamaConfig) -> None:
    """Raises RequestError unless every int and float field is such a number, and positive."""
    for field in dataclasses.fields(config):
        value = getattr(config, field.name)
        if field.type == "int":
            _check_whole(field.name, value)
        elif field.type != "float":
            continue
        elif not isinstance(value, int | float) or isinstance(value, bool):
            raise RequestError(f"{field.name} is {value!r}; it must be a number.")
        if not 0 < value < math.inf:
            raise RequestError(f"{field.name} is {value}; it must be positive and finite.")


@dataclasses.dataclass(frozen=True)
class RopeScaling:
    """The `llama3` frequency scaling (transformers: `rope_type="llama3"`)."""

    factor: float
    low_freq_factor: float
    high_freq_factor: float
    original_max_position_embeddings: int

    def __post_init__(self):
        _check_numbers(self)
        if self.high_freq_factor <= self.low_freq_factor:
            raise RequestError(
                f"high_freq_factor {self.high_freq_factor} must be above low_freq_factor "
                f"{self.low_freq_factor}."
            )


@dataclasses.dataclass(frozen=True)
class LlamaConfig:
    """A Llama decoder; field names and meanings are those of transformers' LlamaConfig.

    No field that changes the numbers has a default: a checkpoint that does not say is refused,
    or read with the default transformers documents for it (`from_hf`).
    """

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    rms_norm_eps: float
    rope_theta: float
    rope_scaling: RopeScaling | None
    max_position_embeddings: int
    tie_word_embeddings: bool

    def __post_init__(self):
        _check_numbers(self)
        if self.num_attention_heads % self.num_key_value_heads:
            raise RequestError(
                f"num_attention_heads {self.num_attention_heads} is not a multiple of "
                f"num_key_value_heads {self.num_key_value_heads}."
            )
        if self.head_dim % 2:
            raise RequestError(f"head_dim is {self.head_dim}; rotary embedding needs an even one.")

    @classmethod
    def from_hf(cls, config: Mapping[str, Any]) -> LlamaConfig:
        """Reads the mapping in a transformers `config.json` (both the rope_theta/rope_scaling and
        the newer rope_parameters form). Raises RequestError when the model is not a Llama."""
        kind = config.get("model_type", "nothing")
        if kind != "llama":
            raise RequestError(f"model_type is {kind!r}; only 'llama' decoders can be read.")
        for key, accepted in _LLAMA_ONLY.items():
            if config.get(key, accepted) != accepted:
                raise RequestError(f"{key} is {config[key]!r}; only {accepted!r} can be read.")
        missing = [k for k in _REQUIRED if k not in config]
        if missing:
            raise RequestError(f"config.json lacks {', '.join(missing)}.")
        rope = dict(config.get("rope_parameters") or config.get("rope_scaling") or {})
        kind = rope.get("rope_type", rope.get("type", "default"))
        if kind not in ("default", "llama3"):
            raise RequestError(f"rope_type is {kind!r}; 'default' and 'llama3' can be read.")
        theta = rope.get("rope_theta", config.get("rope_theta"))
        if theta is None:
            raise RequestError("config.json lacks rope_theta; add it (10000.0 for Llama 1 and 2).")
        scaling = None
        if kind == "llama3":
            names = [f.name for f in dataclasses.fields(RopeScaling)]
            lacking = [n for n in names if n not in rope]
            if lacking:
                raise RequestError(f"the llama3 rope scaling lacks {', '.join(lacking)}.")
            scaling = RopeScaling(**{n: rope[n] for n in names})
        heads, hidden = config["num_attention_heads"], config["hidden_size"]
        return cls(
            **{k: config[k] for k in _REQUIRED},
            num_key_value_heads=config.get("num_key_value_heads") or heads,
            head_dim=config.get("head_dim") or hidden // heads,
            rope_theta=float(theta),
            rope_scaling=scaling,
            tie_word_embeddings=bool(config.get("tie_word_embeddings", False)),
        )

    def to_hf(self) -> dict[str, Any]:
        """The mapping transformers' `LlamaConfig` reads, and `from_hf` too."""
        out = {"model_type": "llama", "architectures": ["LlamaForCausalLM"]}
        out |= {k: v for k, v in dataclasses.asdict(self).items() if k != "rope_scaling"}
        out |= dict(_LLAMA_ONLY)
        scaling = self.rope_scaling and dataclasses.asdict(self.rope_scaling)
        return out | {"rope_scaling": scaling and {"rope_type": "llama3", **scaling}}


_REQUIRED = (
    "vocab_size",
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
    "rms_norm_eps",
    "max_position_embeddings",
)
_LLAMA_ONLY = {"hidden_act": "silu", "attention_bias": False, "mlp_bias": False}

# What can follow what: the original CombLlama, and our own form.
FORMS = {"layers": "tanh", "decoder": "lse"}


@dataclasses.dataclass(frozen=True)
class CombConfig:
    """A Llama decoder whose history is compressed into K/V of a few layers.

    encoder, gate: `"decoder", "lse"` is our own form (the frozen decoder encodes the chunks, one
        softmax over history and recent tokens); `"layers", "tanh"` is the original CombLlama (its
        own bidirectional layers, tanh-gated cross-attention before the named decoder layers).
    cross_layers: decoder layers that see the history, ascending. Empty: a plain Llama.
    chunk_size: most tokens in a history chunk.
    sink_tokens: first tokens of the history that the other layers keep (`lse` form only).
    summary_layers: cross layers whose keys and queries say which words stand in front of a token
        (`lse` form only). summary_tokens: of how many, the token itself among them.
    chunk_token_index: the original's placeholder for a chunk; only carried through.
    """

    text: LlamaConfig
    encoder: str
    gate: str
    cross_layers: tuple[int, ...]
    chunk_size: int
    sink_tokens: int = 4
    chunk_token_index: int | None = None
    summary_layers: tuple[int, ...] = ()
    summary_tokens: int = 32

    def __post_init__(self):
        if FORMS.get(self.encoder) != self.gate:
            known = " or ".join(f"encoder {e!r} with gate {g!r}" for e, g in FORMS.items())
            raise RequestError(
                f"encoder {self.encoder!r} with gate {self.gate!r} is no known form; use {known}."
            )
        layers = self.cross_layers
        wholes = [("chunk_size", self.chunk_size), ("sink_tokens", self.sink_tokens)]
        wholes += [("summary_tokens", self.summary_tokens)]
        wholes += [("a cross layer", i) for i in layers]
        wholes += [("a summary layer", i) for i in self.summary_layers]
        if self.chunk_token_index is not None:
            wholes.append(("chunk_token_index", self.chunk_token_index))
        for name, value in wholes:
            _check_whole(name, value)
        if list(layers) != sorted(set(layers)) or any(
            not 0 <= i < self.text.num_hidden_layers for i in layers
        ):
            raise RequestError(
                f"cross layers {list(layers)} must be ascending, without repeats, and within "
                f"0..{self.text.num_hidden_layers - 1}."
            )
        summaries = self.summary_layers
        if list(summaries) != sorted(set(summaries)) or not set(summaries) <= set(layers):
            raise RequestError(
                f"summary layers {list(summaries)} must be ascending, without repeats, and among "
                f"the cross layers {list(layers)}."
            )
        if summaries and self.is_original:
            raise RequestError("the original form (encoder 'layers') has no summary layers.")
        if not 1 <= self.summary_tokens <= MOST_SUMMARY_TOKENS:
            raise RequestError(
                f"summary_tokens is {self.summary_tokens}; it must be within "
                f"1..{MOST_SUMMARY_TOKENS}."
            )
        if not 1 <= self.chunk_size <= MOST_CHUNK_TOKENS:
            raise RequestError(
                f"chunk_size is {self.chunk_size}; it must be within 1..{MOST_CHUNK_TOKENS}."
            )
        if not 0 <= self.sink_tokens <= MOST_SINK_TOKENS:
            raise RequestError(
                f"sink_tokens is {self.sink_tokens}; it must be within 0..{MOST_SINK_TOKENS}."
            )

    @property
    def is_original(self) -> bool:
        """Whether this is the original CombLlama form."""
        return self.gate == "tanh"

    @property
    def upper_layers(self) -> tuple[int, ...]:
        """Cross layers in the decoder's upper half, where a question's tokens know what they ask
        for."""
        return tuple(i for i in self.cross_layers if 2 * i >= self.text.num_hidden_layers)

    def keeping(self, layers: Sequence[int]) -> CombConfig:
        """The history kept in these layers, with summaries in those of the upper half."""
        bare = dataclasses.replace(self, cross_layers=tuple(layers), summary_layers=())
        own = () if self.is_original else bare.upper_layers
        return dataclasses.replace(bare, summary_layers=own)

    def to_json(self) -> dict[str, Any]:
        """The native `config.json`."""
        return {
            "model_type": "combkv",
            "format_version": FORMAT_VERSION,
            "encoder": self.encoder,
            "gate": self.gate,
            "cross_attention_layers": list(self.cross_layers),
            "chunk_size": self.chunk_size,
            "sink_tokens": self.sink_tokens,
            "summary_layers": list(self.summary_layers),
            "summary_tokens": self.summary_tokens,
            **self._carried(),
            "text_config": self.text.to_hf(),
        }

    @classmethod
    def from_json(cls, config: Mapping[str, Any]) -> CombConfig:
        """Reads a native, CombLlama or plain Llama `config.json` mapping. A plain Llama becomes a
        model without cross layers (`with_history` gives it some)."""
        kind = config.get("model_type")
        if kind == "combkv":
            version = config.get("format_version")
            if version != FORMAT_VERSION:
                raise RequestError(
                    f"format_version is {version!r}; this release reads {FORMAT_VERSION}."
                )
            try:
                return cls(
                    text=LlamaConfig.from_hf(config["text_config"]),
                    encoder=config["encoder"],
                    gate=config["gate"],
                    cross_layers=tuple(config["cross_attention_layers"]),
                    chunk_size=config["chunk_size"],
                    sink_tokens=config["sink_tokens"],
                    chunk_token_index=config.get("chunk_token_index"),
                    # Without them in folders of the first release.
                    summary_layers=tuple(config.get("summary_layers", ())),
                    summary_tokens=config.get("summary_tokens", cls.summary_tokens),
                )
            except KeyError as error:
                raise RequestError(f"config.json lacks {error.args[0]}.") from None
        if kind == "combllama":
            if "text_config" not in config or "cross_attention_layers" not in config:
                raise RequestError("config.json lacks text_config or cross_attention_layers.")
            return cls(
                text=LlamaConfig.from_hf(config["text_config"]),
                encoder="layers",
                gate="tanh",
                cross_layers=tuple(config["cross_attention_layers"]),
                chunk_size=1024,
                chunk_token_index=config.get("chunk_token_index"),
            )
        return plain(LlamaConfig.from_hf(config))

    def to_combllama(self) -> dict[str, Any]:
        """The `config.json` of the original CombLlama."""
        return {
            "model_type": "combllama",
            "architectures": ["CombLlamaForConditionalGeneration"],
            "text_config": self.text.to_hf(),
            "cross_attention_layers": list(self.cross_layers),
            "num_hidden_layers": self.text.num_hidden_layers + len(self.cross_layers),
            **self._carried(),
        }

    def _carried(self) -> dict[str, int]:
        index = self.chunk_token_index
        return {} if index is None else {"chunk_token_index": index}


def plain(text: LlamaConfig) -> CombConfig:
    """A Llama without compressed history."""
    return CombConfig(text, encoder="decoder", gate="lse", cross_layers=(), chunk_size=1024)


def every_fourth(num_layers: int) -> tuple[int, ...]:
    """The original's choice: before layers 3, 7, 11, ..."""
    return tuple(range(3, num_layers, 4))


def read_config(folder: Path) -> dict[str, Any]:
    """The mapping in `folder/config.json`, or a RequestError that says what is wrong with it."""
    path = Path(folder) / "config.json"
    if not path.is_file():
        raise RequestError(f"{folder} has no config.json.")
    try:
        config = json.loads(path.read_text(encoding="utf-8-sig"))
    except (ValueError, RecursionError) as error:
        raise RequestError(f"{path} is not JSON: {error}.") from None
    if not isinstance(config, dict):
        raise RequestError(f"{path} holds a {type(config).__name__}; a JSON object is expected.")
    return config


# Shapes of published models, so that they can be planned for without the hub.
LLAMA_3_1_8B = LlamaConfig(
    vocab_size=128256,
    hidden_size=4096,
    intermediate_size=14336,
    num_hidden_layers=32,
    num_attention_heads=32,
    num_key_value_heads=8,
    head_dim=128,
    rms_norm_eps=1e-5,
    rope_theta=500000.0,
    rope_scaling=RopeScaling(8.0, 1.0, 4.0, 8192),
    max_position_embeddings=131072,
    tie_word_embeddings=False,
)

SMOLLM2_135M = LlamaConfig(
    vocab_size=49152,
    hidden_size=576,
    intermediate_size=1536,
    num_hidden_layers=30,
    num_attention_heads=9,
    num_key_value_heads=3,
    head_dim=64,
    rms_norm_eps=1e-5,
    rope_theta=100000.0,
    rope_scaling=None,
    max_position_embeddings=8192,
    tie_word_embeddings=True,
)


@dataclasses.dataclass(frozen=True)
class Preset:
    """A published model: where it comes from and what was measured for it.

    cross_layers: the measured list, or None while nobody has measured it.
    text: the decoder's shapes, where planning should work without the hub; with a measured list,
        a folder or file of the same model is known by them, whatever it is called.
    """

    hub_id: str
    chunk_size: int = 1024
    cross_layers: tuple[int, ...] | None = None
    text: LlamaConfig | None = None


PRESETS = {
    "llama-3.1-8b": Preset("meta-llama/Llama-3.1-8B", text=LLAMA_3_1_8B),
    "llama-3.1-8b-instruct": Preset("meta-llama/Llama-3.1-8B-Instruct", text=LLAMA_3_1_8B),
    "llama-3.2-1b": Preset("meta-llama/Llama-3.2-1B"),
    "llama-3.2-1b-instruct": Preset("meta-llama/Llama-3.2-1B-Instruct"),
    "llama-3.2-3b": Preset("meta-llama/Llama-3.2-3B"),
    "llama-3.2-3b-instruct": Preset("meta-llama/Llama-3.2-3B-Instruct"),
    "combllama-11b": Preset("PIC-COMB/CombLlama-11B-Instruct"),
    # Chosen by `python evaluate.py --select-layers` (docs/layers.md).
    "smollm2-135m": Preset(
        "HuggingFaceTB/SmolLM2-135M-Instruct",
        chunk_size=384,
        cross_layers=(0, 5, 7, 8, 17, 18, 23),
        text=SMOLLM2_135M,
    ),
}
