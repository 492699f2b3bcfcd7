"""Checks, without transformers, that a model's files exist and that mmrl trains models of its type."""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Final

from mmrl.types import UserError

_HUB_ID: Final = re.compile(r"[\w.-]+(/[\w.-]+)?")
_HUB_TIMEOUT_S: Final = 10.0

UNSUPPORTED: Mapping[str, str] = {
    "qwen4_exp": "Qwen3.8-Flash-Next attends to chosen blocks of keys and looks up tables of n-grams, which the shared "
    "prefix does not follow; no engine runs it without a GPU",
    "qwen2_5_omni": "it takes and generates audio",
    "qwen2_5_omni_thinker": "it takes audio",
    "qwen3_omni_moe": "it takes and generates audio",
    "qwen3_omni_moe_thinker": "it takes audio",
    "qwen2_audio": "it takes audio and no images",
    "qwen3_asr": "it takes audio and no images",
}
"""Model types of Qwen in transformers that are not trained, each with the reason."""


def check_model_type(path: str, families: Collection[str] | None) -> None:
    """Check that a model is in a folder or on the hub, and that its type is in `families`; None allows any.

    For a hub id, config.json comes from the local cache. If it is not there, it is downloaded into the cache.

    Raises:
        UserError: there is no such model, it is of another family, or the hub cannot be reached.
    """
    model_type = _read_model_type(path)
    if families is not None and model_type not in families:
        reason = f" ({UNSUPPORTED[model_type]})" if model_type in UNSUPPORTED else ""
        raise UserError(
            f"model.path: {path!r} is a {model_type!r} model{reason}; mmrl trains {', '.join(families)}, and "
            "others through `model.family: {fn: ./file.py:function}`"
        )


def check_weight_files(folder: Path) -> None:
    """Check that a model's folder has weights, and every file that its index names. An interrupted copy lacks some.

    Raises:
        UserError: weights are missing, or the index is damaged.
    """
    weights = {file.name for file in folder.iterdir() if file.suffix in (".safetensors", ".bin")}
    if not weights:
        raise UserError(f"model.path: {str(folder)!r} holds no weights (*.safetensors); restore its files")
    index = folder / "model.safetensors.index.json"
    # transformers reads a whole file rather than shards, where both are there.
    if "model.safetensors" in weights or not index.is_file():
        return
    try:
        shards = set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values())
    except (OSError, ValueError, KeyError, AttributeError, TypeError) as error:
        raise UserError(f"model.path: {index} cannot be read ({error!r}); restore it") from error
    missing = sorted(shards - weights)
    if missing:
        raise UserError(
            f"model.path: {str(folder)!r} lacks {len(missing)} of {len(shards)} weight files, {missing[0]} for one; "
            "restore them"
        )


def has_contradictory_ties(path: str) -> bool:
    """Return True if config.json ties the output matrix to the embedding in `text_config` but not at its top level."""
    config = json.loads((_find_folder(path) / "config.json").read_text(encoding="utf-8"))
    inner = config.get("text_config", {}).get("tie_word_embeddings", False)
    return bool(inner) and not config.get("tie_word_embeddings", False)


def read_weight_names(path: str) -> list[str]:
    """Return the names of weights, from the headers of the safetensors files of a folder or of a cached hub id.

    Raises:
        UserError: the header of a file is damaged.
    """
    names: list[str] = []
    for file in sorted(_find_folder(path).glob("*.safetensors")):
        # 8 bytes with the length of the header, then the header as JSON: github.com/huggingface/safetensors, "Format".
        with file.open("rb") as opened:
            length = int.from_bytes(opened.read(8), "little")
            try:
                names += json.loads(opened.read(length))
            except ValueError as error:
                raise UserError(f"model.path: {file} is damaged ({error}); restore it") from error
    return [name for name in names if name != "__metadata__"]


def _read_model_type(path: str) -> str:
    file = _find_folder(path) / "config.json"
    if not file.is_file():
        is_run = file.with_name("config.yaml").is_file()
        hint = "it is an mmrl run, and its model is in its folder `model`" if is_run else "name another"
        raise UserError(f"model.path: {path!r} is not a model folder, because it has no config.json; {hint}")
    try:
        model_type = json.loads(file.read_text(encoding="utf-8")).get("model_type")
    except (OSError, ValueError, AttributeError) as error:
        raise UserError(f"model.path: {file} cannot be read ({error}); restore it") from error
    if not isinstance(model_type, str):
        raise UserError(f"model.path: {file} has no `model_type`; it is not a model of transformers")
    return model_type


def _find_folder(path: str) -> Path:
    """Return the folder at a path, or of a hub id in the cache; downloads its config.json there if it is missing."""
    if Path(path).is_dir():
        return Path(path)
    if not _HUB_ID.fullmatch(path) or path.startswith("."):
        raise UserError(f"model.path: there is no folder {path!r} (looked in {Path.cwd()}); correct the path")
    from huggingface_hub import HfApi, errors, hf_hub_download, try_to_load_from_cache

    cached = try_to_load_from_cache(path, "config.json")
    if isinstance(cached, str):
        return Path(cached).parent
    head = f"model.path: there is no folder {path!r} (looked in {Path.cwd()}), and it cannot be fetched as a hub id"
    try:
        # One request first: without a network, a download would retry five times, for half a minute.
        HfApi().model_info(path, timeout=_HUB_TIMEOUT_S)
        return Path(hf_hub_download(path, "config.json")).parent
    except errors.RepositoryNotFoundError as error:
        raise UserError(
            f"{head}: the hub shows no such model; correct the name, or, if it is private or gated, ask for access at "
            f"https://huggingface.co/{path} and log in with `hf auth login`"
        ) from error
    # An OSError may also mean that HF_HUB_OFFLINE forbids the network.
    except (errors.HTTPError, OSError) as error:  # type: ignore[attr-defined]
        raise UserError(
            f"{head}: the network or the hub could not be reached ({error}), and the cache (HF_HOME) lacks it; fill it "
            f"by `hf download {path}` where there is a network, or with `--local-dir DIR` a folder for model.path"
        ) from error
