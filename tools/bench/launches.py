"""Counts what a GPU would be asked to do: operators, and waits of the host, for one picture and for one token.

Of the vision tower alone it also counts what transformers' own SDPA asks for.

    python tools/bench/launches.py                  # Qwen2.5-VL of 3B and 7B, one picture of 4,096 patches
    python tools/bench/launches.py --sizes 3B --json

Real code runs on a pretended device, in bfloat16, with nothing computed and no weights: it needs no GPU.
"""

from __future__ import annotations

from typing import Any

import torch
from results import make_parser, write_results

from mmrl.plan.pretended_device import PretendedDevice, pretend_device
from mmrl.policy.batch import Batch, BatchMedia, PrefixGroup, PromptBatch
from mmrl.policy.families import PlaceholderRun
from mmrl.policy.policy import Policy
from mmrl.policy.vision_attention import install_vision_attention

# Hidden size, layers, heads, key heads, width of the MLP, vocabulary: config.json of the released models.
LANGUAGE = {"3B": (2048, 36, 16, 2, 11008, 151936), "7B": (3584, 28, 28, 4, 18944, 152064)}
IMAGE_ID = 151655
TEXT_TOKENS, RESPONSES, RESPONSE_TOKENS = 64, 8, 512


def make_model(size: str, max_layers: int | None) -> Any:
    """Return a Qwen2.5-VL without memory, of at most so many blocks."""
    from transformers import Qwen2_5_VLConfig, Qwen2_5_VLForConditionalGeneration

    hidden, layers, heads, key_heads, mlp, vocabulary = LANGUAGE[size]
    text = {
        "hidden_size": hidden,
        "num_hidden_layers": min(layers, max_layers or layers),
        "num_attention_heads": heads,
        "num_key_value_heads": key_heads,
        "intermediate_size": mlp,
        "vocab_size": vocabulary,
        "rope_parameters": {"rope_type": "default", "rope_theta": 1e6, "mrope_section": [16, 24, 24]},
    }
    vision = {"depth": min(32, max_layers or 32), "hidden_size": 1280, "num_heads": 16, "intermediate_size": 3420}
    vision |= {
        "out_hidden_size": hidden,
        "window_size": 112,
        "patch_size": 14,
        "fullatt_block_indexes": [7, 15, 23, 31],
    }
    config = Qwen2_5_VLConfig(
        text_config=text, vision_config=vision, image_token_id=IMAGE_ID, tie_word_embeddings=size == "3B"
    )
    with torch.device("meta"):
        return Qwen2_5_VLForConditionalGeneration._from_config(config, dtype=torch.bfloat16, attn_implementation="sdpa")


def make_media(patches_per_side: int, count: int) -> BatchMedia:
    patches = torch.zeros(count * patches_per_side**2, 1176)
    grids = torch.tensor([[1, patches_per_side, patches_per_side]] * count).reshape(-1, 3)
    keys, nothing = tuple(map(str, range(count))), torch.zeros(0, 3, dtype=torch.int64)
    return BatchMedia(
        image_patches_MD=patches,
        image_grids_I3=grids,
        image_keys=keys,
        video_patches_MD=torch.zeros(0, 1176),
        video_grids_V3=nothing,
        video_keys=(),
    )


def make_prompt(policy: Policy, patches_per_side: int, pictures: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return ids [1, P] and position ids [3, 1, P] of a prompt with pictures."""
    grid = (1, patches_per_side, patches_per_side)
    ids = [1] * TEXT_TOKENS
    for _ in range(pictures):
        ids += [1, *[IMAGE_ID] * (patches_per_side**2 // 4)]
    runs = {IMAGE_ID: [PlaceholderRun(grid)] * pictures}
    return torch.tensor([ids]), policy.family.position_ids(ids, runs, merge_size=2)[:, None]


def make_batch(policy: Policy, patches_per_side: int, pictures: int) -> Batch:
    """Return one packed group: a prompt, and its responses."""
    prompt, positions = make_prompt(policy, patches_per_side, pictures)
    length = prompt.shape[1]
    response_positions = positions.max() + 1 + torch.arange(RESPONSE_TOKENS).repeat(RESPONSES)
    ids = torch.cat([prompt, torch.ones(1, RESPONSES * RESPONSE_TOKENS, dtype=torch.int64)], dim=1)
    predictors = torch.arange(length - 1, ids.shape[1] - 1)
    predictors[::RESPONSE_TOKENS] = length - 1
    return Batch(
        input_ids_BL=ids,
        token_types_BL=(ids == IMAGE_ID).long(),
        position_ids_3BL=torch.cat([positions, response_positions.expand(3, 1, -1)], dim=-1),
        prefix_tree=(PrefixGroup(length, (RESPONSE_TOKENS,) * RESPONSES),),
        media=make_media(patches_per_side, pictures),
        target_ids_N=torch.ones(len(predictors), dtype=torch.int64),
        predictor_index_N=predictors,
        temperature_N=torch.ones(len(predictors)),
        banned_token_ids=(IMAGE_ID,),
    )


def take_counts(device: PretendedDevice) -> dict[str, int]:
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
    with pretend_device() as device:
        model = make_model("3B", max_layers)
        device.place(model)
        tower, media = model.model.visual, make_media(patches_per_side, pictures)
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
        # Nothing of these is ours without our attention, even where the backward pass does not say whose line waits.
        counts["waits"] = counts.pop("waits, ours") + counts.pop("waits, theirs")
    return found


def count_learning(size: str, patches_per_side: int, max_layers: int | None) -> dict[str, dict[str, int]]:
    """Return the counts of a micro-batch with one picture, by pass."""
    with pretend_device() as device:
        model = make_model(size, max_layers)
        device.place(model)
        policy = Policy(model)
        batch = make_batch(policy, patches_per_side, 1)
        take_counts(device)
        logprobs_N = policy.compute_logprobs(batch).logprobs_N
        found = {"forward": take_counts(device)}
        logprobs_N.sum().backward()
        found["backward"] = take_counts(device)
    return found


def count_sampling(size: str, patches_per_side: int, max_layers: int | None) -> dict[str, dict[str, int]]:
    """Return the counts of the prefill of a prompt with one picture, and of one token of all rows."""
    with pretend_device() as device:
        model = make_model(size, max_layers)
        device.place(model)
        policy = Policy(model)
        ids, positions = make_prompt(policy, patches_per_side, 1)
        mask = torch.ones_like(ids)
        batch = PromptBatch(
            input_ids_BP=ids,
            token_types_BP=(ids == IMAGE_ID).long(),
            attention_mask_BP=mask,
            position_ids_3BP=positions,
            media=make_media(patches_per_side, 1),
        )
        take_counts(device)
        cache, logits_BV = policy.prefill(batch)
        rows = policy.fork_cache(cache, [0] * RESPONSES, mask)
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
    parser.add_argument("--sizes", nargs="+", choices=LANGUAGE, default=list(LANGUAGE))
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
