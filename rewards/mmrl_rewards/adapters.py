"""Makes a reward callable as other trainers call theirs: TRL, ms-swift, verl, EasyR1, OpenRLHF and verifiers.

    from mmrl_rewards.adapters import TrlReward

    trainer = GRPOTrainer(reward_funcs=[TrlReward("box:iou", threshold=0.5, coordinates="norm_1000")], ...)

A reward abstains by raising `Unscorable`. TRL and ms-swift accept None as the value of an abstention. The others get
`fallback`, by default the low end of the reward's range, and the field `unscorable`, which they log, is 1.

docs/other_trainers.md says where each goes, and tests/unit/rewards/test_trainer_adapters.py names the file that each
signature was read from.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Callable, Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar, cast

from mmrl.answer import COORDINATE_TYPES, ResponseFormat, parse_answer_value
from mmrl.types.errors import MediaError, Unscorable, UserError
from mmrl.types.rollout import FinishReason, Response, RewardValue
from mmrl.types.sample import AnswerType, CoordinateSystem, ImageRef, ResizeMap, Sample, Size, Target, use_media_opener
from mmrl.utils.plugin_args import read_plugin_options, validate_args
from mmrl.utils.plugins import load_function
from mmrl_rewards.contract import Reward, bind, value_and_reason

if TYPE_CHECKING:
    from mmrl.types.sample import Pixels, VideoRef

_LOG = logging.getLogger(__name__)
_EnumT = TypeVar("_EnumT", AnswerType, CoordinateSystem)
# The end of a prompt, in characters, by which it is found in the text of prompt and response.
_PROMPT_END_CHARS = 64
_BICUBIC = 3  # of PIL
_END_TOKENS = re.compile(r"(?:<\|\w+\|>|</s>|\s)*\Z")


class TextReward:
    """Scores texts by one reward, whatever trainer they come from."""

    def __init__(
        self,
        fn: str | Reward[...],
        *,
        target: str = "solution",
        answer_type: str | None = None,
        response_format: Mapping[str, object] | None = None,
        coordinates: str | None = None,
        target_coordinates: str | None = None,
        image_size: Sequence[int] | str | None = None,
        resize: Callable[[int, int], tuple[int, int]] | None = None,
        opening: str = "",
        count_tokens: Callable[[str], int] | None = None,
        fallback: float | None = None,
        **args: object,
    ) -> None:
        """Load the reward, and check settings and options.

        Args:
            fn: a reward, or its name: `box:iou` for one of mmrl, `./mine.py:name` from the working folder.
            target: column of the correct answers, in TRL and ms-swift.
            answer_type: type of the correct answers. None for the only one that the reward declares, or text for a
                reward that does not judge answers.
            response_format: settings of `response_format` in a config. None for an answer in <answer> tags after
                optional thinking in <think> tags.
            coordinates: coordinate system that the model writes: px_original, px_resized, norm_1 or norm_1000. Answers
                with coordinates need it.
            target_coordinates: coordinate system of the correct answers; None for `coordinates`.
            image_size: width and height of all images, or the column that has them, where the trainer does not pass
                PIL images.
            resize: maps the width and height of an image to those that the model sees; px_resized needs it.
            opening: text that the chat template writes before the response, such as <think>.
            count_tokens: returns a text's length in tokens, for rewards of length in a trainer that passes no token
                ids. None counts words.
            fallback: value of an abstention in a trainer that has none; None for the low end of the range.
            args: options of the reward.

        Raises:
            UserError: there is no such reward; a setting or an option is unknown, missing or of the wrong type.
        """
        self.reward = _load_reward(fn) if isinstance(fn, str) else fn
        self.__name__ = self.reward.name  # names its metrics in TRL and verifiers
        for name in self.reward.options:
            if name in (TextReward.__init__.__kwdefaults__ or {}):
                raise UserError(f"reward {self.__name__!r} has an option {name!r}, as the adapters have: rename it")
        self._bound = bind(self.reward, args)
        self._target, self._image_size, self._resize = target, image_size, resize
        self._opening, self._count_tokens = opening, count_tokens
        self._fallback = self.reward.low if fallback is None else fallback
        self._answer_type = _choose_answer_type(self.reward, answer_type)
        if coordinates is None and self._answer_type in COORDINATE_TYPES:
            raise UserError(f"reward {self.__name__!r} needs `coordinates`, the system that the model writes")
        self._coordinates = _to_enum(CoordinateSystem, coordinates or "px_original")
        self._target_coordinates = _to_enum(CoordinateSystem, target_coordinates or self._coordinates)
        if resize is None and CoordinateSystem.PX_RESIZED in (self._coordinates, self._target_coordinates):
            raise UserError(f"reward {self.__name__!r}: px_resized needs `resize`, from an image's size to the model's")
        options = read_plugin_options(ResponseFormat, skip=0)
        settings = {"thinking": "optional"} if response_format is None else response_format
        self._format = ResponseFormat(**validate_args("response_format", options, settings))
        self.num_unscorable = 0  # abstentions so far

    def score(
        self,
        text: str,
        ground_truth: object,
        columns: Mapping[str, Any],
        question: str = "",
        num_tokens: int | None = None,
    ) -> RewardValue:
        """Return the reward of one response.

        The correct answer is a Python value, or text as a model writes it. PIL images in the columns `image` or
        `images` are the sample's; all columns are in `sample.meta`. If `num_tokens` is None, it is counted.

        Raises:
            Unscorable: the reward abstains.
            UserError: the reward returned no number in its range.
        """
        text = self._opening + text
        if num_tokens is None:
            num_tokens = self._count_tokens(text) if self._count_tokens else len(text.split())
        images = columns.get("images") or columns.get("image") or []
        pictures = list(images) if isinstance(images, list | tuple) else [images]
        response = Response(
            text=text,
            answer=self._format.parse(text, self._answer_type),
            finish_reason=FinishReason.EOS,  # few trainers report it
            num_tokens=num_tokens,
            resize_maps=self._make_resize_maps(pictures, columns),
            coordinate_system=self._coordinates,
        )
        value = self._read_ground_truth(ground_truth)
        target = Target(answer_type=self._answer_type, value=value, coordinate_system=self._target_coordinates)
        refs = [ImageRef(path=str(index), sha256="") for index in range(len(response.resize_maps) or len(pictures))]
        sample = Sample(id="row", task="row", parts=(*refs, question), target=target, meta=columns)
        with use_media_opener(_PictureOpener(pictures)):
            result = self._bound(response, sample)
        value, reason = value_and_reason(result)
        if not isinstance(value, int | float) or not self.reward.low <= value <= self.reward.high:
            raise UserError(
                f"reward {self.__name__!r} returned {value!r}, which is not a number from {self.reward.low} to "
                f"{self.reward.high}, for {text!r:.80}"
            )
        return RewardValue(float(value), reason)

    def _score_or_none(self, *row: Any) -> float | None:  # noqa: ANN401  (the arguments of `score`)
        """Return the value of `score`, or None where the reward abstains, which is counted and logged."""
        try:
            return self.score(*row).value
        except Unscorable as error:
            self.num_unscorable += 1
            # Only at powers of two: a service that is down for an hour would fill the log.
            if self.num_unscorable.bit_count() == 1:
                message = "reward %r abstained, %d times so far: %s (the next message comes after %d)"
                _LOG.warning(message, self.__name__, self.num_unscorable, error, 2 * self.num_unscorable)
            return None

    def _score_or_fall_back(self, *row: Any) -> tuple[float, float]:  # noqa: ANN401  (as above)
        """Return the value of `score` and 0, or the fallback and 1 where the reward abstains."""
        value = self._score_or_none(*row)
        return (self._fallback, 1.0) if value is None else (value, 0.0)

    def _read_ground_truth(self, ground_truth: object) -> object:
        """Return the value of a correct answer. Text that is not of its type stays, for the reward to refuse."""
        if hasattr(ground_truth, "tolist"):  # of numpy, as in rows from Parquet
            ground_truth = ground_truth.tolist()
        if not isinstance(ground_truth, str):
            return ground_truth
        answer = self._format.parse(ground_truth, self._answer_type)
        if answer.value is not None:
            return answer.value
        try:
            return parse_answer_value(self._answer_type, ground_truth.strip())
        except ValueError:
            return ground_truth

    def _make_resize_maps(self, pictures: Sequence[Any], columns: Mapping[str, Any]) -> tuple[ResizeMap, ...]:
        """Return how each image was resized, or nothing where sizes are not known."""
        size = columns.get(self._image_size) if isinstance(self._image_size, str) else self._image_size
        if size is not None:
            sizes = [Size(*map(int, size))] * max(1, len(pictures))
        else:
            sizes = [Size(*picture.size) for picture in pictures if hasattr(picture, "size")]
        if len(sizes) < len(pictures):
            return ()
        return tuple(ResizeMap(size, Size(*self._resize(*size)) if self._resize else size) for size in sizes)

    def _take_row(self, columns: Mapping[str, Any], index: int, length: int) -> tuple[object, dict[str, Any]]:
        """Return the correct answer and the columns of one row; raise a UserError if the target's is missing."""
        # Arguments of the trainer that are not columns are not lists of this length.
        lists = {name: column for name, column in columns.items() if isinstance(column, list | tuple)}
        row = {name: column[index] for name, column in lists.items() if len(column) == length}
        if self._target not in row:
            raise UserError(f"the rows have no column {self._target!r}, only {', '.join(row)}: set `target`")
        return row[self._target], row


class TrlReward(TextReward):
    """One of `reward_funcs` of TRL's GRPOTrainer."""

    def __call__(
        self,
        prompts: Sequence[Any],
        completions: Sequence[Any],
        completion_ids: Sequence[Sequence[int]] | None = None,
        log_metric: Callable[[str, float], None] | None = None,
        **columns: object,
    ) -> list[float | None]:
        """Return the reward of each completion, None where it abstains; TRL logs how often as `unscorable/NAME`."""
        values = []
        for index, completion in enumerate(completions):
            target, row = self._take_row(columns, index, len(completions))
            text, question = _join_texts(completion, "assistant"), _join_texts(prompts[index], "user")
            num_tokens = None if completion_ids is None else len(completion_ids[index])
            values.append(self._score_or_none(text, target, row, question, num_tokens))
        if log_metric is not None:
            log_metric(f"unscorable/{self.__name__}", float(values.count(None)))
        return values


class SwiftReward(TextReward):
    """A reward for `orms` of ms-swift, which calls each entry once: `orms["iou"] = lambda args=None: reward`."""

    def __call__(self, completions: Sequence[str], **columns: object) -> list[float | None]:
        """Return the reward of each completion, None where it abstains."""
        values = []
        for index, completion in enumerate(completions):
            target, row = self._take_row(columns, index, len(completions))
            question, turns = _join_texts(row.get("messages", ""), "user"), row.get("response_token_ids")
            num_tokens = sum(map(len, turns)) if turns else None
            values.append(self._score_or_none(completion, target, row, question, num_tokens))
        return values


class VerlReward(TextReward):
    """A `compute_score` of verl. `extra_info` holds the columns, one of them the question, if a reward reads it."""

    def __call__(
        self, solution_str: str, ground_truth: object, extra_info: Mapping[str, object] | None = None, **more: object
    ) -> dict[str, float]:
        """Return the reward of one response."""
        row = {**(extra_info or {}), **more}
        value, unscorable = self._score_or_fall_back(solution_str, ground_truth, row, str(row.get("question", "")))
        return {"score": value, "unscorable": unscorable}


class EasyR1Reward(TextReward):
    """A batch `compute_score` of EasyR1, which passes neither images nor columns."""

    def __call__(self, reward_inputs: Sequence[Mapping[str, Any]]) -> list[dict[str, float]]:
        """Return the reward of each response."""
        scores = []
        for row in reward_inputs:
            response, target, num_tokens = row["response"], row["ground_truth"], row["response_length"]
            value, unscorable = self._score_or_fall_back(response, target, row, "", num_tokens)
            scores.append({"overall": value, "unscorable": unscorable})
        return scores


class OpenRlhfReward(TextReward):
    """A `reward_func` of OpenRLHF, which passes neither images nor columns."""

    def __call__(
        self, queries: Sequence[str], prompts: Sequence[str], labels: Sequence[object], **_: object
    ) -> dict[str, Any]:
        """Return the rewards of responses, tensors of shape [responses]; each response is the end of a query."""
        import torch  # what OpenRLHF takes

        scores = []
        for query, prompt, label in zip(queries, prompts, labels, strict=True):
            # Decoding may have changed the prompt: an image's placeholder is repeated.
            prompt_end = prompt[-_PROMPT_END_CHARS:]
            # Earlier turns of the prompt may end like its last one.
            text = query.split(prompt_end, prompt.count(prompt_end))[-1]
            if prompt_end not in query:
                raise UserError(f"the query {query!r:.80} does not contain the end of its prompt")
            scores.append(self._score_or_fall_back(_END_TOKENS.sub("", text), label, {}))
        rewards, unscorable = torch.tensor(scores).unbind(-1)
        return {"rewards": rewards, "scores": rewards, "extra_logs": {"unscorable": unscorable}}


class VerifiersReward(TextReward):
    """One of `funcs` of a Rubric of verifiers. Columns come from the row and from `info`.

    A Rubric gives 0 to a reward that raises, as to a bad answer. So an abstention returns the fallback and is logged.
    """

    def __call__(
        self, completion: object, answer: object, prompt: object = "", info: object = None, **columns: object
    ) -> float:
        """Return the reward of one completion."""
        row = {**columns, **info} if isinstance(info, dict) else columns
        text, question = _join_texts(completion, "assistant"), _join_texts(prompt, "user")
        return self._score_or_fall_back(text, answer, row, question)[0]


class _PictureOpener:
    """Implements `MediaOpener` for images in memory."""

    def __init__(self, pictures: Sequence[object]) -> None:
        self._pictures = pictures

    def read_image(self, ref: ImageRef, size: Size | None) -> Pixels:
        import numpy as np

        picture: Any = self._pictures[int(ref.path)] if self._pictures else None
        if not hasattr(picture, "convert"):
            raise MediaError(f"the trainer passed {picture!r:.80} for an image, not a PIL image")
        picture = picture.convert("RGB")
        # A view of the picture's bytes, which is read-only.
        return np.asarray(picture.resize(size, _BICUBIC) if size else picture)

    def read_frames(self, ref: VideoRef, seconds: Sequence[float], size: Size | None) -> Pixels:
        raise MediaError("no trainer passes the frames of videos")


def _load_reward(name: str) -> Reward[...]:
    module = name.partition(":")[0]
    if module.isidentifier() and find_spec(f"mmrl_rewards.{module}"):
        name = f"mmrl_rewards.{name}"
    found = load_function(name, Path.cwd(), role="reward")
    if not isinstance(found, Reward):
        raise UserError(f"{name!r} is not a reward of single responses: decorate it with @mmrl.reward(name=...)")
    return found


def _choose_answer_type(reward: Reward[...], answer_type: str | None) -> AnswerType:
    known = reward.answer_types
    if answer_type is None and len(known) == 1:
        return known[0]
    if answer_type is None and reward.judges_answer:
        raise UserError(f"reward {reward.name!r} needs `answer_type`, one of {', '.join(known or AnswerType)}")
    chosen = _to_enum(AnswerType, answer_type or "text")
    if known and chosen not in known:
        raise UserError(f"reward {reward.name!r} scores {', '.join(known)}, not {chosen}")
    return chosen


def _to_enum(kind: type[_EnumT], value: str) -> _EnumT:
    if value not in list(kind):
        raise UserError(f"{value!r} is none of {', '.join(kind)}")
    return kind(value)


def _join_texts(messages: object, role: str) -> str:
    """Return text as it is, and for messages the texts of one role, such as the model's."""
    if isinstance(messages, str):
        return messages
    texts = []
    for message in cast("Sequence[object]", messages):
        fields = message if isinstance(message, Mapping) else vars(message)
        content = fields.get("content") or ""
        if not isinstance(content, str):
            content = "".join(part["text"] for part in content if part.get("type") == "text")
        if fields.get("role") == role:
            texts.append(content)
    return "\n".join(texts)
