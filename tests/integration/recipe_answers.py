"""A rollout engine that answers in the place of a model: right and wrong, both in a recipe's own response format.

A random tiny model is never right, so the rewards of a recipe would tell its responses apart by chance alone. Here the
first of two siblings gives the published answer of its row, and the second an answer of the same form that is wrong.
Where a prompt has one response, or more than two, every second prompt is answered right.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch

from mmrl import EngineContext, GeneratedTokens, GenerationRequest, RolloutEngine, SamplingParams, types
from mmrl.policy.batch import collate
from mmrl.rollout.weight_sync import WeightStream
from mmrl.utils.observations import SEED_KEY
from mmrl_datasets.environments import pages, phone

NOTHING = "nothing of the kind"
DRAWING = '<svg xmlns="http://www.w3.org/2000/svg" width="64" height="64"><rect width="40" height="40"/></svg>'


class AnsweringEngine(RolloutEngine):
    """Writes responses, and computes their log-probabilities with the policy."""

    shares_weights = True

    def __init__(
        self, context: EngineContext, recipe: str, make_environment: Callable[[], types.Environment] | None
    ) -> None:
        self.policy, self.processor = context.policy, context.processor
        self.recipe, self.make_environment = recipe, make_environment

    def generate(
        self, requests: Sequence[GenerationRequest], sampling_params: SamplingParams, *, record_routes: bool = False
    ) -> list[list[GeneratedTokens]]:
        """Answer each request."""
        continuations = []
        for position, request in enumerate(requests):
            siblings = []
            for number in range(request.num_samples):
                index = request.rollout.index + number
                right = index == 0 if request.num_samples == 2 or request.rollout.segments else position % 2 == 0
                siblings.append(self.answer(request.rollout, sampling_params, right=right))
            continuations.append(siblings)
        return continuations

    def answer(self, rollout: types.Rollout, sampling_params: SamplingParams, *, right: bool) -> GeneratedTokens:
        """Return the tokens of the next turn of a rollout."""
        answer, sections = self.choose_answer(rollout, right=right)
        tags = self.processor.response_format._expected_sections()
        thought = "".join(f"<{tag}>{sections.get(tag, '...')}</{tag}>" for tag in tags)
        sample = replace(rollout.prompt.sample, thinking=thought or None)
        demonstration = self.processor.build_demonstration(replace(rollout.prompt, sample=sample), answer)
        ids: list[int] = []
        for segment in demonstration.segments:
            ids += segment.token_ids
        return GeneratedTokens(ids, self.score(rollout, ids, sampling_params), types.FinishReason.EOS)

    def choose_answer(self, rollout: types.Rollout, *, right: bool) -> tuple[types.Target | str, Mapping[str, str]]:
        """Return an answer or a whole response, and the texts of the sections that hold a part of the answer."""
        sample = rollout.prompt.sample
        target = sample.target if right else make_wrong(sample.target)
        text = partial(types.Target, answer_type=types.AnswerType.TEXT)
        match self.recipe:
            case "mobile_r1" if sample.task == "phone":
                return text(value=self.ask_expert(rollout) if right else NOTHING), {}
            case "vrag_rl":
                return self.ask_expert(rollout) if right else f"<answer>{NOTHING}</answer>", {}
            case "frame_thinker":
                return text(value=f"output answer: {target.value}"), {}
            case "clip_reward":
                return target.value if right else "a cat a cat a cat a cat", {}
            case "sgp":
                return text(value=DRAWING if right else NOTHING), {}
            case "time_master":
                return text(value="Check its plug."), {"class": target.value}
            case "stvg_o1":
                seconds = [box["time"] for box in sample.target.value]
                return target, {"time": f"[{min(seconds)}, {max(seconds) + 1}]" if right else "[0, 0.1]"}
        return target, {}

    def ask_expert(self, rollout: types.Rollout) -> str:
        """Return what the expert of the environment does after the turns of a rollout."""
        environment, sample = self.make_environment(), rollout.prompt.sample
        environment.reset(sample, int(sample.meta.get(SEED_KEY, 0)))
        for turn in rollout.turns:
            environment.expert()  # an expert counts what it has done
            environment.step(turn.action)
        return environment.expert()

    @torch.no_grad()
    def score(self, rollout: types.Rollout, ids: Sequence[int], sampling_params: SamplingParams) -> list[float]:
        """Return the log-probability of each token, in nats."""
        segment = types.Segment(token_ids=tuple(ids), logprobs=(0.0,) * len(ids), author=types.Author.POLICY)
        longer = replace(rollout, segments=(*rollout.segments, segment), sampling_params=sampling_params)
        experience = types.Experience(rollout=longer, advantage=0.0)
        pad_id = self.processor.tokenizer.eos_token_id
        batch = collate([[experience]], self.processor, pad_id=pad_id, shared_prefix=False)
        return self.policy.compute_logprobs(batch).logprobs_N[-len(ids) :].tolist()

    def load_weights(self, weights: WeightStream) -> None:
        """Do nothing: the weights are the policy's own."""

    def logits_dtypes(self) -> set[str]:
        """Return the dtype of the policy's logits."""
        return {str(self.policy.logits_dtype).removeprefix("torch.")}


def make_wrong(target: types.Target) -> types.Target:
    """Return an answer of the same type that is wrong."""
    value = target.value
    wrong: Any
    match target.answer_type:
        case types.AnswerType.NUMBER:
            wrong = 3 - value if value in (1, 2) else value + 1  # of two replies, the other one
        case types.AnswerType.CHOICE:
            wrong = "B" if value == "A" else "A"
        case types.AnswerType.LATEX:
            wrong = "12345"
        case types.AnswerType.BOX:
            wrong = corner_of(value)
        case types.AnswerType.BOXES:
            wrong = () if value else (types.Region((0.0, 0.0, 90.0, 90.0)),)
        case types.AnswerType.SPAN:
            wrong = (value[0], value[0] + (value[1] - value[0]) / 8)
        case types.AnswerType.ACTION:
            wrong = types.Action("press_back" if value.name != "press_back" else "enter", {})
        case types.AnswerType.LIST:
            wrong = ("99",)
        case types.AnswerType.JSON:
            wrong = [{**item, "bbox_2d": corner_of(item["bbox_2d"])} for item in value]
        case _:
            wrong = {"yes": "no", "no": "yes"}.get(value, NOTHING)
    return replace(target, value=wrong)


def corner_of(box: Sequence[float]) -> tuple[float, ...]:
    """Return a box that covers a sixty-fourth of another."""
    x1, y1, x2, y2 = box
    return (x1, y1, x1 + (x2 - x1) / 8, y1 + (y2 - y1) / 8)


def make_engine(context: EngineContext, *, recipe: str, data: str) -> AnsweringEngine:
    """Make the engine; `data` is the folder that the recipe reads."""
    makers = {"mobile_r1": phone.make, "vrag_rl": partial(pages.make, corpus=f"{data}/pages.jsonl")}
    return AnsweringEngine(context, recipe, makers.get(recipe))
