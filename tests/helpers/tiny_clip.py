"""A small CLIP from scratch, for rewards that compare texts with images."""

from collections.abc import Sequence
from pathlib import Path

LONGEST = 8  # tokens of a text, its beginning and its end included
_SPECIAL = ("<pad>", "<bos>", "<eos>", "<unk>")


def write_clip(folder: Path, words: Sequence[str] = (), longest: int = LONGEST) -> Path:
    """Write a CLIP with random weights, a tokenizer of whole words and an image processor, as transformers does."""
    import torch

    from mmrl.utils.torch_cpu_compat import tolerate_cuda_builds

    tolerate_cuda_builds()
    from tokenizers import Tokenizer, models, pre_tokenizers, processors
    from transformers import CLIPConfig, CLIPImageProcessor, CLIPModel, CLIPProcessor, PreTrainedTokenizerFast

    torch.manual_seed(0)
    vocabulary = [*_SPECIAL, *words]
    layers = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2}
    ids = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
    text = {**layers, **ids, "vocab_size": len(vocabulary), "max_position_embeddings": longest}
    vision = {**layers, "image_size": 32, "patch_size": 8}
    CLIPModel(CLIPConfig(text_config=text, vision_config=vision, projection_dim=8)).save_pretrained(folder)
    ids_by_word = {word: index for index, word in enumerate(vocabulary)}
    tokenizer_model = Tokenizer(models.WordLevel(ids_by_word, unk_token="<unk>"))
    tokenizer_model.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer_model.post_processor = processors.TemplateProcessing(
        single="<bos> $A <eos>", special_tokens=[("<bos>", 1), ("<eos>", 2)]
    )
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer_model, pad_token="<pad>", bos_token="<bos>", eos_token="<eos>", unk_token="<unk>"
    )
    sizes = {"size": {"shortest_edge": 32}, "crop_size": {"height": 32, "width": 32}}
    CLIPProcessor(CLIPImageProcessor(**sizes), tokenizer).save_pretrained(folder)
    return folder
