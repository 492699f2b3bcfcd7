"""Episodes: each turn of a response is an action in an environment, whose observation precedes the next turn.

    .., POLICY | <|im_start|>user .. image .. <|im_start|>assistant, ENVIRONMENT | .., POLICY

`mmrl.types.environment` says what an environment is.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import chain, islice
from pathlib import Path

from mmrl.answer.text import parse_answer_value
from mmrl.answer.tool_calls import CALL_END, CALL_START, find_final_call
from mmrl.config.schema import EnvironmentConfig
from mmrl.media.pixel_reader import PixelReader
from mmrl.policy.processor import PromptProcessor
from mmrl.rollout.environments.episodes import Ask, EpisodeReply, EpisodeRequest, EpisodeWorkers
from mmrl.rollout.environments.pictures import save_picture
from mmrl.rollout.steps.base import RolloutContext, add_metrics
from mmrl.rollout.tools.executor import ToolRunner, append_reply, cut_text, encode_part
from mmrl.rollout.tools.media_results import find_media
from mmrl.types import (
    LAST_MEDIUM,
    Action,
    AnswerType,
    Author,
    Failure,
    FailureKind,
    ImageRef,
    MediaError,
    MediaRef,
    Observation,
    Rollout,
    RolloutBatch,
    Segment,
    StepResult,
    Target,
    Turn,
    UserError,
    VideoRef,
)
from mmrl.utils.observations import SEED_KEY
from mmrl.utils.seeds import derive_seed

_NO_CALL = (
    'Your last turn contained no action. End a turn with <tool_call>{"name": "...", "arguments": {...}}</tool_call>.'
)
_NO_ANSWER = "Your last turn contained no action. Write it where an answer belongs."


@dataclass(slots=True)
class _Episode:
    """An episode in progress."""

    rollout: Rollout
    digests: list[str] = field(default_factory=list)  # of the observation after each action of the environment's turns
    is_over: bool = False

    def end(self, *, truncated: bool = False, failure: Failure | None = None) -> None:
        """End the episode; `truncated` marks its last turn as the one where a limit ended it."""
        self.is_over = True
        turns = self.rollout.turns
        if truncated and turns:
            turns = (*turns[:-1], replace(turns[-1], truncated=True))
        self.rollout = replace(self.rollout, turns=turns, failure=failure)


@dataclass(frozen=True, slots=True, kw_only=True)
class EnvironmentStep:
    """Takes each turn of a rollout as an action, and lets the policy continue after the observation."""

    options: EnvironmentConfig
    workers: EpisodeWorkers
    processor: PromptProcessor
    pictures_dir: Path  # folder of the pictures that environments draw
    seed: int  # root of the seeds for samples that state none
    context: RolloutContext | None = None  # the policy's, with `sampling_params` for one turn; None for an expert
    probe: str | None = None  # the probe that these rollouts belong to; its name follows "~" in their samples' ids

    def __call__(self, batch: RolloutBatch, *, step: int) -> RolloutBatch:
        """Return the batch with every episode played to its end or to a limit. Raises as `_take_turn`."""
        played, metrics = self._play(list(chain.from_iterable(batch.groups)), step)
        remaining = iter(played)
        groups = tuple(tuple(islice(remaining, len(group))) for group in batch.groups)
        return add_metrics(replace(batch, groups=groups), metrics)

    def complete(self, demonstrations: Sequence[Rollout]) -> tuple[list[Rollout], Mapping[str, float]]:
        """Return an episode of the environment's expert for each of `demonstrations`, which come without text.

        The metrics count all episodes. Raises UserError if an environment failed, or has no expert.
        """
        expert = replace(self, context=None)
        played, metrics = expert._play([replace(demonstration, segments=()) for demonstration in demonstrations])
        for rollout in played:
            if rollout.failure is not None:
                raise UserError(f"sample {rollout.prompt.sample.id}: no demonstration: {rollout.failure.reason}")
        return list(map(self.processor.parse_rollout, played)), metrics

    def _play(self, rollouts: Sequence[Rollout], step: int = 0) -> tuple[list[Rollout], dict[str, float]]:
        """Play the episode of each rollout; return the rollouts with all turns, and metrics of all episodes."""
        counts: Counter[str] = Counter()
        episodes = list(map(_Episode, rollouts))
        playing = dict(enumerate(episodes))
        num_turns = 0
        while playing:
            num_turns += 1
            # All episodes take their turn together, in one request to the processes and one to the engine.
            requests = [self._make_request(key, episode) for key, episode in playing.items()]
            counts["turns"] += len(requests)
            for request, outcome in zip(requests, self.workers.play(requests), strict=True):
                is_last = num_turns == self.options.turns
                counts.update(self._take_turn(playing[request.key], request, outcome, is_last=is_last))
            playing = {key: episode for key, episode in playing.items() if not episode.is_over}
            if playing and self.context is not None:
                waiting = [episode.rollout for episode in playing.values()]
                longer = self.context.sampler.extend(waiting, self.context.sampling_params, step=step)
                for episode, rollout in zip(playing.values(), longer, strict=True):
                    episode.rollout = rollout
        # Episodes that a limit ended still have an open environment.
        self.workers.close_episodes(key for key, episode in enumerate(episodes) if episode.rollout.turns)
        played = [episode.rollout for episode in episodes]
        return played, count_episodes(self.options.name, played, counts)

    def _take_turn(
        self, episode: _Episode, request: EpisodeRequest, outcome: EpisodeReply | Failure, *, is_last: bool
    ) -> Counter[str]:
        """Add the outcome of an action to its episode, and show the observation unless the episode is over.

        Returns counts. Raises UserError if the environment failed and `on_error` is `stop`.
        """
        counts: Counter[str] = Counter()
        failure = outcome if isinstance(outcome, Failure) else None
        if isinstance(outcome, EpisodeReply):
            result = self._record(episode, request, outcome)
            if is_last and not episode.is_over:
                episode.end(truncated=True)
            if not episode.is_over:
                failure = self._show(episode, result.observation)
            counts.update(replayed=outcome.replayed, invalid=not episode.rollout.turns[-1].valid)
        if failure is not None:
            counts[failure.kind] += 1
            reason = f"action {len(request.past) + 1}: {failure.reason}"
            if self.options.on_error == "stop":
                raise UserError(f"step {self.options.name}: sample {request.sample.id}, {reason}")
            episode.end(failure=failure._replace(reason=reason, step=self.options.name))
        return counts

    def _make_request(self, key: int, episode: _Episode) -> EpisodeRequest:
        rollout = episode.rollout
        sample = rollout.prompt.sample
        seed = sample.meta.get(SEED_KEY)
        if seed is None:
            original_id = sample.id.removesuffix(f"~{self.probe}") if self.probe else sample.id
            seed = derive_seed(self.seed, "environment", original_id)
        past = tuple(turn.action for turn in rollout.turns if turn.action is not None)
        action = Ask.EXPERT if self.context is None else self._read_action(rollout)
        return EpisodeRequest(key, sample, int(seed), past, tuple(episode.digests), action)

    def _read_action(self, rollout: Rollout) -> str | Action | Ask:
        """Return the action in the last turn of a rollout, or `Ask.STATE` if none can be read."""
        if self.options.action == "tag":
            return Ask.STATE if rollout.answer.text is None else rollout.answer.text
        start = len(rollout.segments)
        while start and rollout.segments[start - 1].author is not Author.ENVIRONMENT:
            start -= 1
        text = self.processor.decode_segments(rollout.segments[start:])
        call = find_final_call(text) if self.options.action == "call" else None
        if call is None:
            return text.strip()
        try:
            action: Action = parse_answer_value(AnswerType.TOOL_CALL, call)
        except ValueError:
            return Ask.STATE
        return action

    def _record(self, episode: _Episode, request: EpisodeRequest, reply: EpisodeReply) -> StepResult:
        """Add a turn to an episode, with the text of the action if the expert took it; return the step's result."""
        result, rollout = reply.result, episode.rollout
        if reply.action is None:  # none could be read
            text = _NO_CALL if self.options.action == "call" else _NO_ANSWER
            ends = self.options.on_invalid == "end"
            result = StepResult(observation=Observation(text=text), valid=False, truncated=ends)
        else:
            episode.digests.append(reply.digest)
        turn = Turn(
            action=reply.action,
            state=reply.state,
            reward=float(result.reward),
            terminated=result.terminated,
            truncated=result.truncated,
            valid=result.valid,
            info={name: float(value) for name, value in result.info.items()},
        )
        segments = rollout.segments
        if request.action is Ask.EXPERT and reply.action is not None:
            segments = (*segments, self._demonstrate(reply.action))
        episode.rollout = replace(rollout, segments=segments, turns=(*rollout.turns, turn))
        episode.is_over = result.terminated or result.truncated
        return result

    def _demonstrate(self, action: str | Action) -> Segment:
        """Return a segment with the expert's action, as the model would write it."""
        if isinstance(action, Action):
            call = json.dumps({"name": action.name, "arguments": dict(action.arguments)}, ensure_ascii=False)
            token_ids = self.processor.tokenize(f"{CALL_START}\n{call}\n{CALL_END}")
        else:
            if self.options.action == "tag":
                target = Target(answer_type=AnswerType.TEXT, value=action)
                action = self.processor.response_format.render(target, None)
            token_ids = (*self.processor.tokenize(action), self.processor.tokenizer.eos_token_id)
        return Segment(token_ids=token_ids, logprobs=(0.0,) * len(token_ids), author=Author.DEMONSTRATION)

    def _show(self, episode: _Episode, observation: Observation) -> Failure | None:
        """Append an observation, or end the episode if it does not fit; return the failure if a medium is unusable."""
        options, processor, rollout = self.options, self.processor, episode.rollout
        text, shown = observation.text, []
        try:
            refs = self._list_media(rollout, observation)
            if len(rollout.observations) + len(refs) > options.max_media:
                episode.end(truncated=True)
                return None
            shown = [encode_part(processor, ref) for ref in refs]
        except (ValueError, OverflowError) as error:
            # The policy asked for a part that does not exist, and the environment could not know that.
            turns = (*rollout.turns[:-1], replace(rollout.turns[-1], valid=False))
            episode.rollout = rollout = replace(rollout, turns=turns)
            text = f"This cannot be shown: {error}."
        except MediaError as error:
            return Failure(FailureKind.ERROR, f"its observation: {error}")
        prefix = processor.tokenize(options.brackets[0], parse_special=True)
        eos = int(processor.tokenizer.eos_token_id)
        if options.action != "call" and rollout.segments[-1].token_ids[-1] != eos:
            prefix = (eos, *prefix)  # the model has not ended its turn
        # Special tokens count only in prefix and suffix: an environment's text cannot end its turn or open another.
        suffix = options.brackets[1] + processor.encoder.response_opening
        ending = processor.tokenize(cut_text(text, options.max_observation_chars))
        ending += processor.tokenize(suffix, parse_special=True)
        longer = append_reply(rollout, prefix, [((), segment) for segment in shown], ending)
        room_for_turn = 0 if self.context is None else self.context.sampling_params.max_new_tokens
        if longer.num_tokens + room_for_turn > options.max_tokens:
            episode.end(truncated=True)
        else:
            episode.rollout = longer
        return None

    def _list_media(self, rollout: Rollout, observation: Observation) -> list[MediaRef]:
        """Return references to the media of an observation, corrupted like the media of the question.

        Raises ValueError, in words for the model, if a medium has no such part; UserError if a picture cannot be saved.
        """
        refs: list[MediaRef] = []
        for medium in observation.media:
            match medium:
                case bytes():
                    refs.append(save_picture(self.pictures_dir, medium))
                case ImageRef() | VideoRef():
                    refs.append(medium)
                case _:
                    is_last = medium.medium_number == LAST_MEDIUM
                    numbered = replace(medium, medium_number=len(rollout.media)) if is_last else medium
                    refs += [ref for _, ref in find_media(numbered, rollout)]
        # A blind probe must stay blind.
        for question_ref in rollout.prompt.sample.media:
            if question_ref.corruption is not None:
                return [replace(ref, corruption=question_ref.corruption) for ref in refs]
        return refs


def make_environment_step(
    options: EnvironmentConfig,
    tool_runner: ToolRunner,
    processor: PromptProcessor,
    *,
    seed: int,
    context: RolloutContext | None = None,
) -> EnvironmentStep:
    """Return a step in which the policy of `context` acts, or the environment's expert if it is None.

    The step has its own processes, which start with the first action.
    """
    media_cache = processor.encoder.media_cache
    media_opener = PixelReader(media_cache.media_policy, media_cache.limits)
    workers = EpisodeWorkers(tool_runner.base_dir, options, media_opener)
    tool_runner.close_workers.append(workers.close)
    return EnvironmentStep(
        options=options,
        workers=workers,
        processor=processor,
        pictures_dir=tool_runner.pictures_dir,
        seed=seed,
        context=context,
    )


def count_episodes(name: str, rollouts: Sequence[Rollout], counts: Mapping[str, int]) -> dict[str, float]:
    """Return the metrics of a step of this name: sums over its episodes, and the `counts` of its actions."""
    names = ("turns", "invalid", "replayed", "terminated", "truncated", "reward", "media_shown", *FailureKind)
    sums: dict[str, float] = {**dict.fromkeys(map(str, names), 0.0), **counts, "episodes": len(rollouts)}
    for rollout in rollouts:
        sums["reward"] += sum(turn.reward for turn in rollout.turns)
        sums["media_shown"] += len(rollout.observations)
        for turn in rollout.turns[-1:]:
            sums["terminated"] += turn.terminated
            sums["truncated"] += turn.truncated
            for key, value in turn.info.items():
                sums[f"info/{key}"] = sums.get(f"info/{key}", 0.0) + value
    return {f"{name}/{key}": float(value) for key, value in sums.items()}
