"""Tiny new models of each family's real class, with tokenizer and processor, small enough to train on a laptop."""

from __future__ import annotations

import copy
import math
from collections.abc import Iterable
from typing import TYPE_CHECKING

import torch
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
from torch import nn

from mmrl.config.schema import FromScratchConfig
from mmrl.policy.families import FAMILIES

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerFast, ProcessorMixin

CONTEXT_TOKENS = 4096

_SPECIAL_TOKENS = (
    "<|endoftext|>",
    "<|im_start|>",
    "<|im_end|>",
    "<|vision_start|>",
    "<|vision_end|>",
    "<|vision_pad|>",
    "<|image_pad|>",
    "<|video_pad|>",
)
_TAG_TOKENS = ("<think>", "</think>", "<answer>", "</answer>")
# Ends of the names of matrices whose product is added to the residual stream.
_RESIDUAL_ENDS = ("o_proj.weight", "out_proj.weight", "down_proj.weight", "experts.down_proj", "attn.proj.weight")
# Qwen's splitting with one difference: punctuation keeps the space after it, so ", " is one token, not two.
_SPLIT_PATTERN = Regex(r" ?\p{L}+|\p{N}|[^\s\p{L}\p{N}]+ ?|\s+")
_CHAT_TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message.role }}\n"
    "{% if message.content is string %}{{ message.content }}"
    "{% else %}{% for part in message.content %}"
    "{% if part.type == 'image' %}<|vision_start|><|image_pad|><|vision_end|>"
    "{% elif part.type == 'video' %}<|vision_start|><|video_pad|><|vision_end|>"
    "{% else %}{{ part.text }}{% endif %}{% endfor %}{% endif %}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def train_tokenizer(texts: Iterable[str], vocab_size: int) -> PreTrainedTokenizerFast:
    """Train a byte-level BPE tokenizer with Qwen's special tokens; any other text still encodes, byte by byte.

    It has at most `vocab_size` tokens, special tokens and tags included; at least 300.
    """
    from transformers import PreTrainedTokenizerFast

    bpe = Tokenizer(models.BPE())
    split = pre_tokenizers.Split(_SPLIT_PATTERN, "isolated")
    to_bytes = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    bpe.pre_tokenizer = pre_tokenizers.Sequence([split, to_bytes])
    bpe.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size - len(_SPECIAL_TOKENS) - len(_TAG_TOKENS),
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    bpe.train_from_iterator(texts, trainer)
    bpe.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in _SPECIAL_TOKENS])
    bpe.add_tokens([AddedToken(tag, special=False, normalized=False) for tag in _TAG_TOKENS])
    # Not Qwen's own tokenizer class: read back from a folder, it would split text in its own way again.
    return PreTrainedTokenizerFast(
        tokenizer_object=bpe, eos_token="<|im_end|>", pad_token="<|endoftext|>", unk_token=None, bos_token=None
    )


def make_processor(
    spec: FromScratchConfig, tokenizer: PreTrainedTokenizerFast, pixels: tuple[int, int]
) -> ProcessorMixin:
    """Return the processor of a tiny model; `pixels` are the least and largest area of a resized image."""
    import transformers

    geometry = {
        "patch_size": spec.vision.patch_size,
        "merge_size": spec.vision.spatial_merge_size,
        "temporal_patch_size": 2,
        "size": {"shortest_edge": pixels[0], "longest_edge": pixels[1]},
    }
    support = FAMILIES[spec.family].from_scratch
    assert support is not None  # the schema lists the families that have it
    if support.has_fixed_tokenizer:
        # With an entry for custom code, even an empty one, transformers takes the class that the folder names.
        tokenizer = copy.copy(tokenizer)
        tokenizer.init_kwargs = {**tokenizer.init_kwargs, "auto_map": {"AutoTokenizer": [None, None]}}
    processor_class = getattr(transformers, support.processor_class)
    video_class = getattr(transformers, support.video_processor_class)
    processor: ProcessorMixin = processor_class(
        image_processor=transformers.Qwen2VLImageProcessor(**geometry),
        tokenizer=tokenizer,
        video_processor=video_class(**geometry),
        chat_template=_CHAT_TEMPLATE,
    )
    return processor


def make_model(
    spec: FromScratchConfig,
    tokenizer: PreTrainedTokenizerFast,
    seed: int,
    *,
    dtype: str = "float32",
    attention: str = "sdpa",
) -> PreTrainedModel:
    """Return a newly initialised model, on the CPU, whose embedding has a row for each token.

    Only `seed` decides the weights; torch's generator is neither read nor changed. `attention` is
    transformers' implementation, `sdpa` or `eager`.

    Raises:
        UserError: qwen2_vl cannot have a vision tower of these sizes.
    """
    family, language, vision = FAMILIES[spec.family], spec.language, spec.vision
    model_class, support = family.model_class, family.from_scratch
    assert support is not None  # as in `make_processor`
    ids = dict(zip(_SPECIAL_TOKENS, map(tokenizer.convert_tokens_to_ids, _SPECIAL_TOKENS), strict=True))
    text_config: dict[str, object] = {
        "vocab_size": len(tokenizer),
        "hidden_size": language.hidden_size,
        "intermediate_size": language.intermediate_size,
        "num_hidden_layers": language.num_layers,
        "num_attention_heads": language.num_heads,
        "num_key_value_heads": language.num_kv_heads,
        "max_position_embeddings": CONTEXT_TOKENS,
        "tie_word_embeddings": True,
        "bos_token_id": None,
        "eos_token_id": ids["<|im_end|>"],
        "pad_token_id": ids["<|endoftext|>"],
    }
    vision_config: dict[str, object] = {
        "depth": vision.num_layers,
        "num_heads": vision.num_heads,
        "patch_size": vision.patch_size,
        "spatial_merge_size": vision.spatial_merge_size,
        "temporal_patch_size": 2,
    }
    config = model_class.config_class(
        text_config=text_config | support.text_config(spec),
        vision_config=vision_config | support.vision_config(spec),
        image_token_id=ids["<|image_pad|>"],
        video_token_id=ids["<|video_pad|>"],
        vision_start_token_id=ids["<|vision_start|>"],
        vision_end_token_id=ids["<|vision_end|>"],
        tie_word_embeddings=True,
    )
    # `devices=[]`: the model is made on the CPU, and forking the generators of GPUs would initialise CUDA.
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = model_class._from_config(config, dtype=getattr(torch, dtype), attn_implementation=attention)
        _init_fan_in(model)
    # A saved copy of the model then stops and pads as a released model does.
    model.generation_config.eos_token_id = ids["<|im_end|>"]
    model.generation_config.pad_token_id = ids["<|endoftext|>"]
    return model


@torch.no_grad()
def _init_fan_in(model: PreTrainedModel) -> None:
    """Initialise matrices with std 1 / sqrt(fan in), half of it where a residual branch ends."""
    # With transformers' own std of 0.02, the image hardly reaches the output of so narrow a model.
    for name, parameter in model.named_parameters():
        if name.endswith("linear_attn.dt_bias"):
            # A head then remembers 10 to 1000 tokens, divided by its A. With transformers' own 1 it forgets within a
            # token. Source: Mamba, arXiv:2312.00752v2, section 3.6.
            step = torch.empty_like(parameter).uniform_(math.log(1e-3), math.log(1e-1)).exp()
            parameter.copy_(step + torch.log(-torch.expm1(-step)))  # the inverse of softplus
        if parameter.ndim < 2 or "embed_tokens" in name or "pos_embed" in name:
            continue
        residual_end = name.endswith(_RESIDUAL_ENDS)
        # Fused experts are a matrix for each expert: [experts, out, in].
        fan_in = parameter.shape[-1] if ".experts." in name else parameter[0].numel()
        std = (0.5 if residual_end else 1.0) / math.sqrt(fan_in)
        nn.init.normal_(parameter, std=std)
