"""One maker for each type that tests build by hand; nothing here imports torch. `videos.py` makes video files.

A test passes what it is about and leaves the rest to the defaults.
"""

import hashlib
import io
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from PIL import Image

from mmrl import types
from mmrl.config import Config


def png_bytes(size: tuple[int, int] = (40, 30), color: tuple[int, int, int] = (0, 0, 0)) -> bytes:
    content = io.BytesIO()
    Image.new("RGB", size, color).save(content, "PNG")
    return content.getvalue()


def image_ref(path: Path) -> types.ImageRef:
    """Return a reference to a file as it is now; the file need not be an image."""
    return types.ImageRef(path=str(path), sha256=hashlib.sha256(path.read_bytes()).hexdigest())


def write_file(path: Path, content: bytes) -> types.ImageRef:
    """Write a file, and the folders above it, and return a reference to it."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(content)
    return image_ref(path)


def make_context(folder: Path, **policy: Any) -> types.DatasetContext:
    """A dataset's context in a folder whose files may be read; `policy` are further fields of `MediaPolicy`."""
    roots = (folder.resolve(),)
    return types.DatasetContext(
        work_dir=folder / "work", base_dir=folder, seed=0, media_policy=types.MediaPolicy(roots=roots, **policy)
    )


def make_sample(
    value: object = 3,
    answer_type: types.AnswerType = types.AnswerType.NUMBER,
    *,
    id: str = "s",
    task: str = "count",
    parts: tuple[types.ContentPart, ...] = ("How many?",),
    coordinate_system: types.CoordinateSystem | None = None,
    media_index: int = 0,
    **fields: Any,
) -> types.Sample:
    target = types.Target(
        answer_type=answer_type, value=value, coordinate_system=coordinate_system, media_index=media_index
    )
    return types.Sample(id=id, task=task, parts=parts, target=target, **fields)


def make_prompt(
    sample: types.Sample | None = None,
    *,
    resize_maps: tuple[types.ResizeMap, ...] = (),
    coordinate_system: types.CoordinateSystem = types.CoordinateSystem.NORM_1,
) -> types.Prompt:
    sample = sample or make_sample()
    return types.Prompt(
        sample=sample,
        token_ids=(1,),
        grids=(),
        resize_maps=resize_maps,
        coordinate_system=coordinate_system,
        digest=f"digest of {sample.id}",
    )


def make_answer(value: object = None) -> types.Answer:
    """A parsed answer; without a value, one whose tag is missing."""
    return types.Answer(text="", thinking=None, value=value, problems=("no answer tag",) if value is None else ())


def make_response(
    text: str = "",
    answer: types.Answer | None = None,
    *,
    num_tokens: int = 0,
    resize_maps: tuple[types.ResizeMap, ...] = (),
    coordinate_system: types.CoordinateSystem = types.CoordinateSystem.PX_ORIGINAL,
) -> types.Response:
    return types.Response(
        text=text,
        answer=answer or make_answer(),
        finish_reason=types.FinishReason.EOS,
        num_tokens=num_tokens,
        resize_maps=resize_maps,
        coordinate_system=coordinate_system,
    )


def make_rollout(
    prompt: types.Prompt | None = None,
    index: int = 0,
    text: str = "",
    answer: types.Answer | None = None,
    *,
    num_tokens: int = 2,
) -> types.Rollout:
    """A finished rollout of `num_tokens` sampled tokens, each with a log-prob of -1."""
    tokens = types.Segment(token_ids=(5,) * num_tokens, logprobs=(-1.0,) * num_tokens, author=types.Author.POLICY)
    return types.Rollout(
        prompt=prompt or make_prompt(),
        index=index,
        segments=(tokens,),
        text=text,
        answer=answer or make_answer(),
        finish_reason=types.FinishReason.EOS,
        sampling_params=types.SamplingParams(max_new_tokens=4),
    )


def make_score(**terms: float) -> types.Score:
    """A score whose terms have these values, without reasons, and whose total is their sum."""
    values = {name: types.RewardValue(float(value), "") for name, value in terms.items()}
    return types.Score(terms=values, total=float(sum(terms.values())))


def make_group(
    prompt: types.Prompt, rollouts: Sequence[types.Rollout], scores: Sequence[types.Score], **fields: Any
) -> types.Group:
    return types.Group(prompt=prompt, rollouts=tuple(rollouts), scores=tuple(scores), **fields)


def make_config(**sections: Mapping[str, Any]) -> Config:
    """A config of one RL stage on a tiny model; each section replaces the one of its name."""
    defaults = {
        "run": {"name": "r"},
        "model": {"from_scratch": {}},
        "data": {"train": [{"fn": "a:b"}]},
        "rewards": {"terms": [{"fn": "mmrl_rewards.number:exact"}]},
        "stages": [{"kind": "rl", "name": "rl", "steps": 1, "prompts_per_step": 1}],
    }
    return Config.model_validate_json(json.dumps(defaults | sections))
