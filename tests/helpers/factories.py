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

from mmrl.config import Config
from mmrl.types import (
    Answer,
    AnswerType,
    Author,
    ContentPart,
    CoordinateSystem,
    DatasetContext,
    FinishReason,
    Group,
    ImageRef,
    MediaPolicy,
    Prompt,
    ResizeMap,
    Response,
    RewardValue,
    Rollout,
    Sample,
    SamplingParams,
    Score,
    Segment,
    Target,
)


def png_bytes(size: tuple[int, int] = (40, 30), color: tuple[int, int, int] = (0, 0, 0)) -> bytes:
    content = io.BytesIO()
    Image.new("RGB", size, color).save(content, "PNG")
    return content.getvalue()


def image_ref(path: Path) -> ImageRef:
    """Return a reference to a file as it is now; the file need not be an image."""
    return ImageRef(path=str(path), sha256=hashlib.sha256(path.read_bytes()).hexdigest())


def write_file(path: Path, content: bytes) -> ImageRef:
    """Write a file, and the folders above it, and return a reference to it."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(content)
    return image_ref(path)


def make_context(folder: Path, **policy: Any) -> DatasetContext:
    """A dataset's context in a folder whose files may be read; `policy` are further fields of `MediaPolicy`."""
    roots = (folder.resolve(),)
    return DatasetContext(
        work_dir=folder / "work", base_dir=folder, seed=0, media_policy=MediaPolicy(roots=roots, **policy)
    )


def make_sample(
    value: object = 3,
    answer_type: AnswerType = AnswerType.NUMBER,
    *,
    id: str = "s",
    task: str = "count",
    parts: tuple[ContentPart, ...] = ("How many?",),
    coordinate_system: CoordinateSystem | None = None,
    media_index: int = 0,
    **fields: Any,
) -> Sample:
    target = Target(answer_type=answer_type, value=value, coordinate_system=coordinate_system, media_index=media_index)
    return Sample(id=id, task=task, parts=parts, target=target, **fields)


def make_prompt(
    sample: Sample | None = None,
    *,
    resize_maps: tuple[ResizeMap, ...] = (),
    coordinate_system: CoordinateSystem = CoordinateSystem.NORM_1,
) -> Prompt:
    sample = sample or make_sample()
    return Prompt(
        sample=sample,
        token_ids=(1,),
        grids=(),
        resize_maps=resize_maps,
        coordinate_system=coordinate_system,
        digest=f"digest of {sample.id}",
    )


def make_answer(value: object = None) -> Answer:
    """A parsed answer; without a value, one whose tag is missing."""
    return Answer(text="", thinking=None, value=value, problems=("no answer tag",) if value is None else ())


def make_response(
    text: str = "",
    answer: Answer | None = None,
    *,
    num_tokens: int = 0,
    resize_maps: tuple[ResizeMap, ...] = (),
    coordinate_system: CoordinateSystem = CoordinateSystem.PX_ORIGINAL,
) -> Response:
    return Response(
        text=text,
        answer=answer or make_answer(),
        finish_reason=FinishReason.EOS,
        num_tokens=num_tokens,
        resize_maps=resize_maps,
        coordinate_system=coordinate_system,
    )


def make_rollout(
    prompt: Prompt | None = None, index: int = 0, text: str = "", answer: Answer | None = None, *, num_tokens: int = 2
) -> Rollout:
    """A finished rollout of `num_tokens` sampled tokens, each with a log-prob of -1."""
    tokens = Segment(token_ids=(5,) * num_tokens, logprobs=(-1.0,) * num_tokens, author=Author.POLICY)
    return Rollout(
        prompt=prompt or make_prompt(),
        index=index,
        segments=(tokens,),
        text=text,
        answer=answer or make_answer(),
        finish_reason=FinishReason.EOS,
        sampling_params=SamplingParams(max_new_tokens=4),
    )


def make_score(**terms: float) -> Score:
    """A score whose terms have these values, without reasons, and whose total is their sum."""
    values = {name: RewardValue(float(value), "") for name, value in terms.items()}
    return Score(terms=values, total=float(sum(terms.values())))


def make_group(prompt: Prompt, rollouts: Sequence[Rollout], scores: Sequence[Score], **fields: Any) -> Group:
    return Group(prompt=prompt, rollouts=tuple(rollouts), scores=tuple(scores), **fields)


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
