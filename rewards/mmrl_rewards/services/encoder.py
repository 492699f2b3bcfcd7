"""Embeds images by a timm backbone, or images and texts by a CLIP, from a local folder; nothing is downloaded."""

from __future__ import annotations

from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from mmrl.types import Unscorable
from mmrl_rewards.pixels import Pixels


def embed_image(folder: str, image: Pixels) -> NDArray[np.float64]:
    """Return the embedding of an image as a float64 unit vector `[embedding_size]`.

    The image is padded with white to a square and resized to the backbone's input. Runs on the CPU in float32.

    Args:
        folder: holds `config.json` and `model.safetensors` of a timm model.
        image: uint8 `[height, width, 3]`.

    Raises:
        Unscorable: there is no timm model in the folder.
    """
    import torch

    model, size, mean, std = _load_backbone(folder)
    side = max(image.shape[:2])
    page = Image.new("RGB", (side, side), "white")
    height, width = image.shape[:2]
    page.paste(Image.fromarray(image), ((side - width) // 2, (side - height) // 2))
    pixels = np.asarray(page.resize((size, size), Image.Resampling.BICUBIC), dtype=np.float32) / 255.0
    with torch.inference_mode():
        features = model(torch.from_numpy((pixels - mean) / std).permute(2, 0, 1)[None])[0].double().numpy()
    return np.asarray(features / np.linalg.norm(features))


@lru_cache(maxsize=2)
def _load_backbone(folder: str) -> tuple[Any, int, NDArray[np.float32], NDArray[np.float32]]:
    _check_folder(folder, "timm model", "with config.json and model.safetensors")
    import timm

    model = timm.create_model(f"local-dir:{folder}", pretrained=True, num_classes=0).eval().float()
    config = timm.data.resolve_model_data_config(model)
    mean, std = (np.array(config[name], dtype=np.float32) for name in ("mean", "std"))
    return model, config["input_size"][-1], mean, std


def embed_caption(folder: str, text: str, *, cut: bool = False) -> NDArray[np.float64]:
    """Return the embedding of a text as a float64 unit vector `[embedding_size]`.

    Args:
        folder: holds a model with an image and a text tower as transformers saves it, such as CLIP or SigLIP, with its
            tokenizer and image processor.
        text: what the image may show.
        cut: of a text with more tokens than the model reads, use only the first ones.

    Raises:
        ValueError: the text has more tokens than the model reads, and may not be cut.
        Unscorable: there is no such model in the folder.
    """
    import torch

    model, processor = _load_image_text_model(folder)
    longest = model.config.text_config.max_position_embeddings
    # SigLIP was trained on padded texts only. To CLIP, padding makes no difference: it ignores what follows the end.
    inputs = processor.tokenizer([text], padding="max_length", truncation=cut, max_length=longest, return_tensors="pt")
    if inputs["input_ids"].shape[1] > longest:
        raise ValueError(f"a text of {inputs['input_ids'].shape[1]} tokens, and the encoder reads {longest}")
    with torch.inference_mode():
        features = model.get_text_features(**inputs).pooler_output[0].double().numpy()
    return np.asarray(features / np.linalg.norm(features))


def embed_captioned_image(folder: str, image: Pixels) -> NDArray[np.float64]:
    """Return the embedding of an image, uint8 `[height, width, 3]`, comparable with the ones of `embed_caption`.

    Raises:
        Unscorable: there is no such model in the folder.
    """
    import torch

    model, processor = _load_image_text_model(folder)
    inputs = processor.image_processor(images=[Image.fromarray(image)], return_tensors="pt")
    with torch.inference_mode():
        features = model.get_image_features(pixel_values=inputs["pixel_values"]).pooler_output[0].double().numpy()
    return np.asarray(features / np.linalg.norm(features))


@lru_cache(maxsize=2)
def _load_image_text_model(folder: str) -> tuple[Any, Any]:
    _check_folder(folder, "model", "as transformers saves a CLIP or SigLIP")
    from transformers import AutoModel, AutoProcessor

    model = AutoModel.from_pretrained(folder, local_files_only=True).eval().float()
    if not hasattr(model, "get_text_features"):
        raise Unscorable(f"the model in {folder!r} has no text tower: it is a {model.config.model_type}")
    return model, AutoProcessor.from_pretrained(folder, local_files_only=True)


def _check_folder(folder: str, kind: str, form: str) -> None:
    """Raise Unscorable if a folder holds no model. Prepare the import of its library."""
    if not (Path(folder) / "config.json").is_file():
        raise Unscorable(f"there is no {kind} in {folder!r}: a folder {form}")
    from mmrl.utils.torch_cpu_compat import tolerate_cuda_builds

    tolerate_cuda_builds()
