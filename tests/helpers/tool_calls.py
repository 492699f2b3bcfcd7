"""Responses that call tools, and the step that answers them; shared by the tests of tools."""

import json
from contextlib import closing
from pathlib import Path
from typing import Any

from samplers import make_pipeline, reworded

from mmrl.config.schema import ToolConfig, ToolsConfig
from mmrl.rollout.steps.base import RolloutStep
from mmrl.rollout.tools.executor import ToolRunner
from mmrl.types import Author, Rollout, RolloutBatch

MEDIA_TOOLS = tuple(ToolConfig(fn=f"mmrl.rollout.tools.builtin:{name}") for name in ("zoom", "frames", "passage"))


def call(name: str, **arguments: Any) -> str:
    """A response's text that ends in a call."""
    return f"Let me see.<tool_call>{json.dumps({'name': name, 'arguments': arguments})}</tool_call>"


def responses(tiny: Any, *texts: str, sample: int = 0) -> RolloutBatch:
    """A group of responses with these texts, each ended by a stop string."""
    prompt = tiny.processor.build(tiny.samples[sample])
    group = tiny.sampler().generate([prompt], len(texts), tiny.params, step=0)[0]
    return RolloutBatch(groups=(tuple(reworded(tiny, *pair) for pair in zip(group, texts, strict=True)),))


def tool_step(tiny: Any, tool_runner: ToolRunner, tools: tuple[ToolConfig, ...], **options: Any) -> RolloutStep:
    """A step that answers one call of each response; `options` are further ones of `ToolsConfig`."""
    settings = ToolsConfig(kind="tools", tools=tools, **{"max_turns": 1, "timeout_s": 60.0, **options})
    pipeline = make_pipeline(tiny, settings, tool_runner=tool_runner, group_size=1)
    assert pipeline.context.sampling_params.stop == ("</tool_call>",)
    return pipeline.steps[0]


def zoom_response(tiny: Any) -> Rollout:
    """A response that looks at a part of its image, and continues after it."""
    with closing(ToolRunner(Path())) as runner:
        step = tool_step(tiny, runner, MEDIA_TOOLS, max_media=4)
        ((rollout,),) = step(responses(tiny, call("zoom", box=[4.0, 8.0, 40.0, 60.0])), step=0).groups
    return rollout


def tool_texts(tiny: Any, rollout: Rollout) -> list[str]:
    """The text that tools wrote into a response, by segment; images and videos have none."""
    segments = [s for s in rollout.segments if s.author is Author.ENVIRONMENT and s.observation is None]
    return [tiny.processor.decode(segment.token_ids) for segment in segments]
