"""Write a tiny new InternVL, for examples/internvl.yaml: `python tools/tiny_internvl.py FOLDER`."""

from __future__ import annotations

import argparse
from pathlib import Path

import torch

from mmrl.policy.tiny_models import train_tokenizer
from mmrl.utils.torch_cpu_compat import import_torchvision

IMAGE_TOKENS = {"start_image_token": "<img>", "end_image_token": "</img>", "context_image_token": "<IMG_CONTEXT>"}


def write_tiny_model(folder: Path) -> None:
    """Write a new model of some 100,000 parameters, for images of 32 x 32 pixels, into a folder."""
    import_torchvision()  # which transformers cannot do beside a torch for CPUs if it was built for CUDA
    import transformers

    base = train_tokenizer(["How many red shapes are there? <answer>3</answer>"], vocab_size=320)
    tokenizer = transformers.PreTrainedTokenizerFast(
        tokenizer_object=base.backend_tokenizer,
        eos_token=base.eos_token,
        pad_token=base.pad_token,
        extra_special_tokens={**IMAGE_TOKENS, "video_token": "<video>"},
    )
    processor = transformers.InternVLProcessor(
        image_processor=transformers.GotOcr2ImageProcessor(size={"height": 32, "width": 32}),
        tokenizer=tokenizer,
        video_processor=transformers.InternVLVideoProcessor(),
        image_seq_length=4,
        chat_template=(
            "{% for message in messages %}<|im_start|>{{ message.role }}\n{% for part in message.content %}"
            "{% if part.type == 'image' %}<IMG_CONTEXT>\n{% else %}{{ part.text }}{% endif %}{% endfor %}<|im_end|>\n"
            "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
        ),
    )
    tower = {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 64}
    language = {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 128}
    config = transformers.InternVLConfig(
        vision_config={**tower, "image_size": [32, 32], "patch_size": [8, 8]},
        text_config={
            **language,
            "model_type": "qwen2",
            "num_key_value_heads": 2,
            "max_position_embeddings": 4096,
            "vocab_size": len(tokenizer),
            "eos_token_id": tokenizer.eos_token_id,
            "pad_token_id": tokenizer.pad_token_id,
            "bos_token_id": None,
        },
        image_token_id=tokenizer.context_image_token_id,
        image_seq_length=4,
    )
    torch.manual_seed(0)
    model = transformers.InternVLForConditionalGeneration(config)
    model.generation_config.eos_token_id = tokenizer.eos_token_id
    model.generation_config.pad_token_id = tokenizer.pad_token_id
    model.save_pretrained(folder)
    processor.save_pretrained(folder)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path, metavar="FOLDER", help="the model is written here")
    write_tiny_model(parser.parse_args().folder)
