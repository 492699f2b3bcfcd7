"""Counts what a GPU would be asked to do: operators, and waits of the host, for one picture and for one token.

For the vision tower, it also counts what transformers' own SDPA asks for.

    python tools/bench/launches.py                  # Qwen2.5-VL of 3B and 7B, one picture of 4,096 patches
    python tools/bench/launches.py --sizes 3B --json

Real code runs on a pretended device, in bfloat16, with nothing computed and no weights: it needs no GPU.
"""

from __future__ import annotations

from typing import Any

import torch
from counting_device import CountingDevice
from results import make_parser, write_results

from mmrl.config.schema import ModelConfig
from mmrl.plan.measure import make_batch, make_policy
from mmrl.plan.pretended_device import pretend_device
from mmrl.plan.shapes import ModelShapes, read_shapes
from mmrl.plan.workload import MicroBatchSizes
from mmrl.policy.batch import Batch, LeftPaddedBatch
from mmrl.policy.decode_cache import DecodeCache
from mmrl.policy.vision_attention import install_vision_attention

SIZES = ("3B", "7B")
TEXT_TOKENS, RESPONSES, RESPONSE_TOKENS = 64, 8, 512


def read_model(size: str, max_layers: int | None = None) -> ModelShapes:
    """Return the shapes of a Qwen2.5-VL, of at most so many blocks."""
    model = read_shapes(ModelConfig(path=f"Qwen/Qwen2.5-VL-{size}"))
    if max_layers is None:
        return model
    text, tower = model.config.text_config, model.config.vision_config
    return model.trim(language=min(max_layers, text.num_hidden_layers), vision=min(max_layers, tower.depth))


def make_group(model: ModelShapes, patches_per_side: int, pictures: int) -> Batch:
    """Return one packed group: a prompt with pictures, and its responses."""
    grids = ((1, patches_per_side, patches_per_side),) * pictures
    prompt_tokens = TEXT_TOKENS + pictures + model.image_tokens(grids)
    responses = (RESPONSE_TOKENS,) * RESPONSES
    sizes = MicroBatchSizes(num_groups=1, prompt_tokens=prompt_tokens, grids=grids, responses=responses)
    return make_batch(model, sizes)


def take_counts(device: Any) -> dict[str, int]:
    """Return the counts since the last call: operators, and waits in transformers' lines and in ours."""
    waits = {"ours": 0, "theirs": 0}
    for place, count in device.synchronisations.items():
        waits["theirs" if place.startswith("transformers/") else "ours"] += count
    counts = {"calls": device.calls.total(), "waits, ours": waits["ours"], "waits, theirs": waits["theirs"]}
    device.calls.clear()
    device.synchronisations.clear()
    return counts


def count_tower(
    patches_per_side: int, pictures: int, max_layers: int | None, *, own_attention: bool = True
) -> dict[str, dict[str, int]]:
    """Return the calls and waits of the vision tower, by pass: with our attention, or with transformers' own."""
    with pretend_device(CountingDevice) as device:
        shapes = read_model("3B", max_layers)
        model: Any = shapes.build("bfloat16")
        device.place(model)
        tower, media = model.model.visual, make_group(shapes, patches_per_side, pictures).media
        grids_I3 = media.image_grids_I3
        if own_attention:
            install_vision_attention(tower)
        else:
            grids_I3 = grids_I3.to(device.device)
        patches_MD = media.image_patches_MD.to(device.device, torch.bfloat16)
        take_counts(device)
        features = tower(patches_MD, grid_thw=grids_I3).pooler_output
        found = {"forward": take_counts(device)}
        features.sum().backward()
        found["backward"] = take_counts(device)
    for counts in found.values():
        # Without our attention, none of these waits are ours, even if the backward pass does not say which line waits.
        counts["waits"] = counts.pop("waits, ours") + counts.pop("waits, theirs")
    return found


def count_learning(size: str, patches_per_side: int, max_layers: int | None) -> dict[str, dict[str, int]]:
    """Return the counts of a micro-batch with one picture, by pass."""
    with pretend_device(CountingDevice) as device:
        model = read_model(size, max_layers)
        policy = make_policy(model, ModelConfig(path="", dtype="bfloat16"))
        device.place(policy.model)
        batch = make_group(model, patches_per_side, 1)
        take_counts(device)
        logprobs_N = policy.compute_logprobs(batch).logprobs_N
        found = {"forward": take_counts(device)}
        logprobs_N.sum().backward()
        found["backward"] = take_counts(device)
    return found


def count_sampling(size: str, patches_per_side: int, max_layers: int | None) -> dict[str, dict[str, int]]:
    """Return the counts of the prefill of a prompt with one picture, and of one token of all rows."""
    with pretend_device(CountingDevice) as device:
        model = read_model(size, max_layers)
        policy = make_policy(model, ModelConfig(path="", dtype="bfloat16"))
        device.place(policy.model)
        group = make_group(model, patches_per_side, 1)
        prompt = slice(group.packed_groups[0].prompt_length)
        mask = torch.ones_like(group.input_ids_BL[:, prompt])
        batch = LeftPaddedBatch(
            input_ids_BP=group.input_ids_BL[:, prompt],
            token_types_BP=group.token_types_BL[:, prompt],
            attention_mask_BP=mask,
            position_ids_3BP=group.position_ids_3BL[..., prompt],
            media=group.media,
        )
        take_counts(device)
        cache, logits_BV = policy.prefill(batch)
        rows = DecodeCache(cache, [0] * RESPONSES, mask, shares_prompts=policy.supports_shared_prefix)
        found = {"prefill": take_counts(device)}
        token_R = logits_BV.argmax(dim=-1).expand(RESPONSES)
        policy.append_text(rows, token_R, token_R)
        take_counts(device)
        policy.append_text(rows, token_R, token_R).argmax(dim=-1).tolist()
        found["token"] = take_counts(device)
        rows.keep_rows(range(1, RESPONSES))
        found["a row that ends"] = take_counts(device)
    return found


def main() -> None:
    parser = make_parser(__doc__)
    parser.add_argument("--sizes", nargs="+", choices=SIZES, default=SIZES)
    parser.add_argument("--side", type=int, default=64, help="patches along a side of a picture")
    parser.add_argument("--layers", type=int, help="run at most so many blocks of each tower")
    options = parser.parse_args()
    side, layers = options.side, options.layers
    found = {
        "tower, one picture": count_tower(side, 1, layers),
        "tower, two pictures": count_tower(side, 2, layers),
        "tower, one picture, transformers' attention": count_tower(side, 1, layers, own_attention=False),
    }
    for size in options.sizes:
        found[size] = count_learning(size, side, layers) | count_sampling(size, side, layers)
    results: dict[str, int] = {}
    for part, by_pass in found.items():
        for name, counts in by_pass.items():
            results |= {f"{part} {name}: {kind}": count for kind, count in counts.items()}
    for name, count in results.items():
        print(f"{name:68} {count:>8}")
    write_results(options.json, "launches", results)


if __name__ == "__main__":
    main()
