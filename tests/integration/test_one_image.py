"""One image from a line of YAML to a gradient in the vision tower. Read it from top to bottom, as documentation."""

import math
from contextlib import ExitStack
from pathlib import Path

import pytest
import torch
from harness import TINY
from PIL import Image
from qwen_vl_utils import fetch_image
from transformers import Qwen2VLImageProcessor

from mmrl.config import load_config
from mmrl.distributed.ranks import SingleProcess
from mmrl.log.console import Console
from mmrl.log.run_dir import RunDir
from mmrl.training.build import RunComponents, RunSetup, build_run
from mmrl.training.functions import load_functions
from mmrl.training.stage import build_learner, build_optimizer
from mmrl.types import AnswerType, Author, CoordinateSystem, Experience, SamplingParams, Size

PATCH, MERGE = 8, 2
YAML = f"""\
run: {{name: one-image, cpu_threads: 1}}
model:
  from_scratch: {TINY}
  dtype: float32
  device: cpu
  min_pixels: 2304
  max_pixels: 2304
  freeze: FROZEN
data:
  train:
    - fn: mmrl_datasets.generators.scenes:grounding
      args: {{split: train, size: 1, image_px: 64}}
rewards:
  terms: [{{fn: "mmrl_rewards.box:iou"}}]
stages:
  - name: rl
    kind: rl
    steps: 1
    prompts_per_step: 1
    group_size: 2
    sampling: {{max_new_tokens: 12}}
"""


def build(folder: Path, *, frozen: str = "[]") -> RunComponents:
    """Build what `mmrl train` builds before its first step."""
    file = folder / "one-image.yaml"
    file.write_text(YAML.replace("FROZEN", frozen))
    loaded = load_config(file)
    setup = RunSetup(
        config=loaded.config,
        base_dir=folder,
        functions=load_functions(loaded.config, folder),
        run_dir=RunDir(folder / "run"),
        console=Console(),
        ranks=SingleProcess(),
    )
    with ExitStack() as resources:
        return build_run(setup, resources)


def test_an_image_from_yaml_to_the_vision_towers_gradient(tmp_path):
    tiny = build(tmp_path)

    # Load. A dataset turned two lines of YAML into a sample: an image by reference, a question, the exact answer.
    (sample,) = tiny.samples.train
    image_ref, question = sample.parts
    assert sample.images == (image_ref,)
    assert question.startswith(("Find the ", "Locate the "))
    assert sample.target.answer_type is AnswerType.BOX
    assert sample.target.coordinate_system is CoordinateSystem.PX_ORIGINAL
    with Image.open(image_ref.path) as image:
        original = Size(*image.size)
    assert original == (64, 64)

    # Build the prompt. The image is resized to model.max_pixels and cut into patches; four of them share a token.
    prompt = tiny.processor.build(sample)
    ((_, rows, columns),) = prompt.grids
    assert (rows, columns) == (48 // PATCH, 48 // PATCH)
    assert prompt.token_ids.count(tiny.processor.placeholders.image_id) == rows * columns // MERGE**2
    assert prompt.resize_maps[0].original == original
    assert prompt.resize_maps[0].resized == (48, 48)

    # The model reads the pixels of the file: transformers on its own makes the same patches of it.
    pixels_MD = tiny.processor.prompt_tensors(prompt).image_patches_MD
    assert torch.equal(pixels_MD, process_independently(image_ref.path))

    # Roll out. The model reads those pixels and samples two responses without a vision token.
    params = SamplingParams(banned_token_ids=tiny.policy.banned_ids(tiny.processor.tokenizer), max_new_tokens=12)
    rollouts = tiny.engine.make_sampler("test").generate([prompt], 2, params, step=0)
    for rollout in rollouts[0]:
        assert rollout.segments[0].author is Author.POLICY
        assert tiny.processor.placeholders.image_id not in rollout.segments[0].token_ids
        assert all(logp < 0.0 for logp in rollout.segments[0].logprobs)

    # Score. A response that is not a box scores 0 and says why; the exact box scores 1. A demonstration gives that box
    # in the model's coordinates, pixels of the resized image, and the reward converts it back.
    (group,) = tiny.scorer.score_groups(rollouts, step=0)
    assert all(0.0 <= total <= 1.0 for total in group.totals)
    assert all(score.terms["iou"].reason for score in group.scores)
    perfect = tiny.processor.build_demonstration(prompt, sample.target)
    assert perfect.answer.value == pytest.approx([side * 48 / 64 for side in sample.target.value])
    assert tiny.scorer.score_eval([perfect])[0].total == pytest.approx(1.0)

    # Learn. Say that one response did better than its sibling: the gradient reaches the first layer that sees pixels,
    # through the language model and the projector, and one update changes it.
    better, worse = rollouts[0]
    experiences = [Experience(rollout=better, advantage=1.0), Experience(rollout=worse, advantage=-1.0)]
    before = patch_embedding(tiny).detach().clone()
    metrics, gradients = learn(tiny, experiences)
    assert gradients[patch_embedding_name(tiny)].norm() > 0.0
    assert all(gradient.norm() > 0.0 for name, gradient in gradients.items() if "merger" in name and "weight" in name)
    assert math.isfinite(metrics["learner/grad_norm"])
    assert not torch.equal(patch_embedding(tiny), before)


def test_a_frozen_vision_tower_and_projector_get_no_gradient(tmp_path):
    tiny = build(tmp_path, frozen="[vision, projector]")
    prompt = tiny.processor.build(tiny.samples.train[0])
    demonstration = tiny.processor.build_demonstration(prompt, prompt.sample.target)
    before = patch_embedding(tiny).detach().clone()
    _, gradients = learn(tiny, [Experience(rollout=demonstration, advantage=0.0)])
    assert gradients
    assert not [name for name in gradients if "visual" in name]
    assert torch.equal(patch_embedding(tiny), before)


def process_independently(path: str) -> torch.Tensor:
    """Return the patches of an image file as qwen-vl-utils and transformers make them, [N, D]."""
    resized = fetch_image({"image": path, "min_pixels": 2304, "max_pixels": 2304}, image_patch_size=PATCH)
    processor = Qwen2VLImageProcessor(patch_size=PATCH, merge_size=MERGE, temporal_patch_size=2)
    return processor(images=[resized], do_resize=False, return_tensors="pt")["pixel_values"]


def learn(tiny: RunComponents, experiences: list[Experience]) -> tuple[dict[str, float], dict[str, torch.Tensor]]:
    """Make one update; return its metrics, and the gradient of each parameter that got one, by name."""
    gradients: dict[str, torch.Tensor] = {}
    for name, parameter in tiny.policy.model.named_parameters():
        if parameter.requires_grad:
            parameter.register_post_accumulate_grad_hook(
                lambda leaf, name=name: gradients.update({name: leaf.grad.detach().clone()})
            )
    (stage,) = tiny.config.stages
    optimizer = build_optimizer(stage, tiny, None)
    learner = build_learner(stage, tiny, optimizer, None)
    return dict(learner.step(experiences, step=0)), gradients


def patch_embedding_name(tiny: RunComponents) -> str:
    """Return the name of the vision tower's first layer, a convolution over patches."""
    (name,) = [name for name, _ in tiny.policy.model.named_parameters() if name.endswith("patch_embed.proj.weight")]
    return name


def patch_embedding(tiny: RunComponents) -> torch.nn.Parameter:
    return tiny.policy.model.get_parameter(patch_embedding_name(tiny))
