"""Memory that a recipe takes on a GPU, part by part: weights, gradients, optimizer, activations, engine.

    python tools/recipe_memory.py configs/recipes/qwen3_5_4b_lora_80gb.yaml
    python tools/recipe_memory.py configs/recipes/qwen3_5_4b_full_8x80gb.yaml --ranks 8

The model is made on torch's meta device, where tensors have shapes and no memory. So its parameters, and what a block
keeps for its backward pass, are counted on the model's real classes. Left out are the CUDA context, workspaces of
kernels, pixels of the prompts and what the allocator leaves unused: a few GB.

Shapes of checkpoints are in checkpoint_shapes.json; for others name their config.json with `--config-json`.
"""

from __future__ import annotations

import mmrl.policy  # noqa: F401  # isort: skip - mends what transformers would trip over, so it comes first

import argparse
import json
from collections import Counter
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import nn
from torch.autograd.graph import saved_tensors_hooks

from mmrl.config import Config, load_config
from mmrl.config.schema import RlStage
from mmrl.policy.batch import PrefixGroup
from mmrl.policy.build import find_untrained_components
from mmrl.policy.families import FAMILIES
from mmrl.policy.lora import create_adapter
from mmrl.policy.policy import Policy

if TYPE_CHECKING:
    from transformers import PreTrainedModel

# Source: config.json of each checkpoint on huggingface.co, without what the class of transformers has as its default.
CHECKPOINT_SHAPES = Path(__file__).with_name("checkpoint_shapes.json")
ROW = (768, (512,) * 8)
"""Tokens of the prompt and of the responses in the row that a block is counted with."""


class Part(NamedTuple):
    """One part of the memory."""

    name: str
    formula: str
    num_bytes: float
    where: str
    """`always` on the GPU, while it `learns`, while it `generates`, in `host` memory, on the GPU of a `server`; or
    `within` the part above."""


class Sizes(NamedTuple):
    """What the parts are computed from."""

    parameters: int
    trained: int
    trained_bytes: int
    """Of the trained parameters as they are stored: bfloat16, or float32 for an adapter."""
    gathered: int
    """Parameters that are whole at a time under ZeRO-3: two blocks, the embeddings and the output matrix."""
    kept_per_token: float
    """Bytes that the block with most of them keeps for its backward pass."""


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("recipe", type=Path)
    parser.add_argument("--ranks", type=int, default=1, help="processes that learn, each on a GPU")
    parser.add_argument("--gpu-gb", type=float, default=80.0, help="memory of a GPU, in GB")
    parser.add_argument("--config-json", type=Path, help="config.json of the model")
    options = parser.parse_args()
    config = load_config(options.recipe).config
    shapes = json.loads(options.config_json.read_text()) if options.config_json else find_shapes(config)
    print("\n".join(describe(config, shapes, options.ranks, options.gpu_gb)))


def find_shapes(config: Config) -> dict[str, Any]:
    """Return the shapes of the checkpoint that a recipe names."""
    known = json.loads(CHECKPOINT_SHAPES.read_text())
    if config.model.path not in known:
        raise SystemExit(f"model.path: no shapes of {config.model.path!r}; name its config.json with --config-json")
    return known[config.model.path]


def describe(config: Config, shapes: dict[str, Any], ranks: int, gpu_gb: float) -> list[str]:
    """Return the lines of the table."""
    parts = list(memory_parts(config, shapes, ranks, gpu_gb))
    lines, total = [], Counter[str]()
    for part in parts:
        note = " in host memory" if part.where == "host" else ""
        lines.append(f"{part.name:<44} {part.formula:<32} {part.num_bytes / 1e9:6.1f} GB{note}")
        for phase in ("learns", "generates"):
            total[phase] += part.num_bytes / 1e9 if part.where in ("always", phase) else 0.0
    host = sum(part.num_bytes for part in parts if part.where == "host") / 1e9
    lines.append(f"a GPU that learns: {total['learns']:.0f} GB")
    if config.rollout.engine != "vllm_server":
        lines[-1] += f"; while it generates: {total['generates']:.0f} GB"
    servers = [part.num_bytes / 1e9 for part in parts if part.where == "server"]
    if servers:
        lines[-1] += f"; one of a server: {servers[0]:.0f} GB"
    if host:
        lines[-1] += f"; in host memory, of all ranks: {host * ranks:.0f} GB"
    return lines


def memory_parts(config: Config, shapes: dict[str, Any], ranks: int, gpu_gb: float) -> Iterator[Part]:
    """Yield the parts of the memory of one rank."""
    stage = next(stage for stage in config.stages if isinstance(stage, RlStage))
    sizes = count_sizes(config, shapes)
    yield from state_parts(config, sizes, ranks)
    if stage.loss.kl.coef and not config.model.lora:
        yield Part("reference for the penalty", f"{giga(sizes.trained)} x 2 bytes", 2 * sizes.trained, "always")
    yield from activation_parts(config, shapes, stage, sizes)
    yield from engine_parts(config, shapes, sizes, gpu_gb)


def state_parts(config: Config, sizes: Sizes, ranks: int) -> Iterator[Part]:
    """Yield what is held between steps: weights, gradients and the optimizer's numbers, as ZeRO divides them."""
    zero = config.deepspeed.zero_stage if config.deepspeed else 0
    # Stage 1 divides the optimizer's numbers, stage 2 gradients too, stage 3 weights too.
    divisors = [ranks if zero >= stage else 1 for stage in (1, 2, 3)]
    shares = [f" / {divisor}" if divisor > 1 else "" for divisor in divisors]
    trained, width = giga(sizes.trained), sizes.trained_bytes // sizes.trained
    weights = giga(sizes.parameters)
    yield Part("weights, bfloat16", f"{weights} x 2 bytes{shares[2]}", 2 * sizes.parameters / divisors[2], "always")
    if config.model.lora:
        yield Part(
            f"adapter of rank {config.model.lora.rank}, float32", f"{trained} x 4 bytes", sizes.trained_bytes, "always"
        )
    yield Part("gradients", f"{trained} x {width} bytes{shares[1]}", sizes.trained_bytes / divisors[1], "always")
    name, width = ("float32 weights and AdamW's two moments", 12) if width == 2 else ("AdamW's two moments, float32", 8)
    where = "host" if config.deepspeed and config.deepspeed.offload_optimizer else "always"
    yield Part(name, f"{trained} x {width} bytes{shares[0]}", width * sizes.trained / divisors[0], where)
    if zero == 3:
        gathered = f"{giga(sizes.gathered)} x 2 bytes"
        yield Part("two blocks and the embeddings, gathered", gathered, 2 * sizes.gathered, "learns")


def activation_parts(config: Config, shapes: dict[str, Any], stage: RlStage, sizes: Sizes) -> Iterator[Part]:
    """Yield what one packed row takes while its gradient is computed."""
    text, vision, tokens = shapes["text_config"], shapes["vision_config"], stage.micro_batch_tokens
    layers, hidden = text["num_hidden_layers"], text["hidden_size"]
    kept = 2 * layers * hidden * tokens
    yield Part(
        f"inputs of {layers} blocks, {tokens:,} tokens", f"{layers} x {hidden} x 2 bytes a token", kept, "learns"
    )
    block = sizes.kept_per_token * tokens
    yield Part("one block, recomputed", f"{sizes.kept_per_token / 1e3:.0f} kB a token", block, "learns")
    if "vision" not in find_untrained_components(config) and not config.model.lora:
        patches = stage.micro_batch_groups * config.model.max_pixels // vision["patch_size"] ** 2
        depth, width = vision["depth"], vision["hidden_size"]
        kept = 2 * depth * width * patches
        yield Part(
            f"inputs of {depth} vision blocks, {patches:,} patches",
            f"{depth} x {width} x 2 bytes a patch",
            kept,
            "learns",
        )
    chunk, vocabulary = config.model.logits_chunk_tokens, text["vocab_size"]
    yield Part("logits", f"{chunk} tokens x {vocabulary:,} x 12 bytes", 12 * chunk * vocabulary, "learns")


def engine_parts(config: Config, shapes: dict[str, Any], sizes: Sizes, gpu_gb: float) -> Iterator[Part]:
    """Yield what vLLM takes: of the learner's GPU, or of each GPU of a server."""
    if config.rollout.engine not in ("vllm", "vllm_server"):
        return
    text, vllm = shapes["text_config"], config.rollout.vllm
    is_server = config.rollout.engine == "vllm_server"
    gpus = vllm.tensor_parallel_size if is_server else 1
    where, title = ("server", "a server's GPU") if is_server else ("generates", "vLLM")
    share = f"{vllm.gpu_memory_utilization:.0%} of {gpu_gb:.0f} GB"
    total, weights = 1e9 * gpu_gb * vllm.gpu_memory_utilization, 2 * sizes.parameters / gpus
    yield Part(title, share, total, where)
    share = f" / {gpus}" if gpus > 1 else ""
    yield Part("  weights, bfloat16", f"{giga(sizes.parameters)} x 2 bytes{share}", weights, "within")
    is_hybrid = "linear_num_value_heads" in text
    # One layer of four attends.
    layers = text["num_hidden_layers"] // (4 if is_hybrid else 1)
    states = 0.0
    if is_hybrid:
        head = text["linear_key_head_dim"] * text["linear_value_head_dim"]
        state = 4 * head * text["linear_num_value_heads"] * (text["num_hidden_layers"] - layers) / gpus
        states = state * vllm.max_num_seqs
        formula = f"{state / 1e6:.0f} MB x {vllm.max_num_seqs} sequences"
        yield Part("  recurrent states, float32", formula, states, "within")
    per_token = 2 * 2 * layers * text["num_key_value_heads"] * text["head_dim"] / gpus
    room = total - weights - states
    formula = f"{per_token / 1e3:.0f} kB x {room / per_token / 1e3:,.0f},000 tokens"
    yield Part("  keys and values, bfloat16", formula, room, "within")
    if not is_server:
        yield Part("  its weights while it sleeps", "the same", weights, "host")


def giga(count: int) -> str:
    """Return a number of parameters in billions (G) or millions (M)."""
    return f"{count / 1e9:.2f} G" if count >= 1e8 else f"{count / 1e6:.0f} M"


def count_sizes(config: Config, shapes: dict[str, Any]) -> Sizes:
    """Count the parameters of a recipe's model, with its adapter and its frozen parts."""
    family = FAMILIES[shapes["model_type"]]
    with torch.device("meta"):
        model = family.model_class(family.model_class.config_class(**shapes)).to(torch.bfloat16)
    parameters = sum(map(torch.numel, model.parameters()))
    create_adapter(model, config.model.lora, seed=0, family=family)
    # As in training: it freezes parameters, and installs the layers of a packed row.
    Policy(model, family=family, freeze=find_untrained_components(config), freeze_router=config.model.freeze_router)
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    decoder: Any = model.get_decoder()
    # A tied output matrix is the embeddings again.
    tables = {model.get_input_embeddings().weight, model.get_output_embeddings().weight}
    blocks = sorted(sum(map(torch.numel, block.parameters())) for block in decoder.layers)
    return Sizes(
        parameters=parameters,
        trained=sum(map(torch.numel, trained)),
        trained_bytes=sum(parameter.nbytes for parameter in trained),
        gathered=sum(blocks[-2:]) + sum(map(torch.numel, tables)),
        kept_per_token=count_kept_bytes(model),
    )


def count_kept_bytes(model: PreTrainedModel) -> float:
    """Return the bytes that autograd keeps for each token of a packed row, of the block with most of them."""
    decoder: Any = model.get_decoder()
    # Four layers have a block of each kind.
    decoder.layers = decoder.layers[:4]
    tree = (PrefixGroup(ROW[0], ROW[1]),)
    num_tokens = ROW[0] + sum(ROW[1])
    storages: dict[int, torch.UntypedStorage] = {}
    totals: list[int] = []

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        storages[tensor.untyped_storage()._cdata] = tensor.untyped_storage()
        return tensor

    def count(*_: object) -> None:
        totals.append(sum(storage.nbytes() for storage in storages.values()))

    for block in decoder.layers:
        block.register_forward_hook(count)
    for parameter in model.parameters():
        pack(parameter)
    count()
    inputs = torch.zeros(1, num_tokens, decoder.config.hidden_size, dtype=torch.bfloat16, device="meta")
    positions = torch.zeros(3, 1, num_tokens, dtype=torch.int64, device="meta")
    with saved_tensors_hooks(pack, nn.Identity()):
        decoder(inputs_embeds=inputs.requires_grad_(), position_ids=positions, prefix_tree=tree, use_cache=False)
    return max(after - before for before, after in pairwise(totals)) / num_tokens


if __name__ == "__main__":
    main()
