"""The asker: prompts of samples, and their tensors for as long as they are needed."""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import Literal

from mmrl.answer import convert_coordinates, validate_value
from mmrl.answer.tool_calls import split_turns
from mmrl.policy.batch import PromptTensors
from mmrl.policy.encoder import EncodedPrompt, PromptEncoder
from mmrl.types import (
    Author,
    FinishReason,
    MediaObservation,
    MediaRef,
    Prompt,
    Rollout,
    Sample,
    SamplingParams,
    Segment,
    Target,
    UserError,
)
from mmrl.utils.picklable_lock import PicklableLock

_CACHE_BYTES = 2**30
_TOOL_MEDIA_CACHE_BYTES = 2**28


class QwenProcessor:
    """Asks samples; every picture is opened, resized and cut into patches once.

    Patches of recent prompts stay in a cache of bounded size; a prompt that has left it is processed again and must
    come out with the same digest. Those of the last `held_steps` steps stay whatever their size. Threads take turns.
    """

    def __init__(self, encoder: PromptEncoder, *, retained_steps: int = 1) -> None:
        self.encoder = encoder
        self.hf_processor = encoder.hf_processor
        self.tokenizer = encoder.hf_processor.tokenizer
        self.grammar = encoder.grammar
        self.placeholders = encoder.placeholders
        self._cache: OrderedDict[str, EncodedPrompt] = OrderedDict()
        self._cached_bytes = 0
        self._retained_ids: deque[frozenset[str]] = deque(maxlen=retained_steps)
        self._tool_media: OrderedDict[str, PromptTensors] = OrderedDict()
        self._tool_media_bytes = 0
        self._lock = PicklableLock()

    def build(self, sample: Sample) -> Prompt:
        """The sample as the model reads it.

        Raises:
            UserError: as `Encoder.encode`.
        """
        return self._get_encoded(sample).prompt

    def prompt_tensors(self, prompt: Prompt) -> PromptTensors:
        """What the model's forward needs of a prompt.

        Raises:
            UserError: as `Encoder.encode`, or its media are not what they were when it was asked.
        """
        feed = self._get_encoded(prompt.sample)
        if feed.prompt.digest != prompt.digest:
            raise UserError(
                f"sample {prompt.sample.id}: its media changed while the run was using them "
                f"(digest {prompt.digest[:12]} became {feed.prompt.digest[:12]}); restore the files"
            )
        return feed.tensors

    def build_tool_segment(self, ref: MediaRef) -> Segment:
        """A medium as a tool shows it within a response. Raises UserError as `Encoder.show`."""
        with self._lock:
            showing = self.encoder.encode_tool_media(ref)
            segment = showing.segment
            assert segment.observation is not None
            before = self._tool_media.pop(segment.observation.digest, None)
            self._tool_media[segment.observation.digest] = showing.tensors
            self._tool_media_bytes += showing.tensors.nbytes - (before.nbytes if before else 0)
            while len(self._tool_media) > 1 and self._tool_media_bytes > _TOOL_MEDIA_CACHE_BYTES:
                self._tool_media_bytes -= self._tool_media.popitem(last=False)[1].nbytes
            return segment

    def tool_media_tensors(self, observation: MediaObservation) -> PromptTensors:
        """What the model's forward needs of a medium that a tool showed; positions count from its first token.

        Raises:
            UserError: as `Encoder.show`, or it is not what it was when it was shown.
        """
        with self._lock:
            if observation.digest not in self._tool_media:
                again = self.build_tool_segment(observation.ref).observation
                if again is None or again.digest != observation.digest:
                    raise UserError(f"{observation.ref.path}: changed since a tool showed it; restore the file")
            self._tool_media.move_to_end(observation.digest)
            return self._tool_media[observation.digest]

    def decode(self, ids: Sequence[int]) -> str:
        """Text of sampled ids, without special tokens."""
        with self._lock:
            return str(self.tokenizer.decode(ids, skip_special_tokens=True))

    def tokenize(self, text: str, *, parse_special: bool = False) -> tuple[int, ...]:
        """Ids of a text; with `marks`, those of the chat template are among them."""
        with self._lock:
            return tuple(
                self.tokenizer(text, add_special_tokens=False, split_special_tokens=not parse_special).input_ids
            )

    def parse_rollout(self, rollout: Rollout) -> Rollout:
        """The rollout with the text and the answer that its segments amount to.

        Once a trigger or a tool has spoken, what stands before does not count as an answer, and what a tool says never.
        """
        kind, second = rollout.prompt.sample.target.answer_type, _last_continuation_start(rollout.segments)
        if second is None:
            text = self._decode_segments(rollout.segments)
            return replace(rollout, text=text, answer=self.grammar.parse(text, kind), is_correct=None)
        draft, text = self._decode_segments(rollout.segments[:second]), self._decode_segments(rollout.segments[second:])
        answer = self.grammar.parse_continuation(draft, text, kind)
        return replace(rollout, text=draft + text, answer=answer, is_correct=None)

    def first_response_text(self, rollout: Rollout) -> str | None:
        """What stands before a response counts: up to its last trigger or tool; None where there is neither."""
        second = _last_continuation_start(rollout.segments)
        return None if second is None else self._decode_segments(rollout.segments[:second])

    def build_demonstration(
        self,
        prompt: Prompt,
        demonstration: Target | str,
        *,
        with_thinking: bool = True,
        loss_on: Literal["response", "answer"] = "response",
    ) -> Rollout:
        """The response a teacher would give, ended by EOS: a right answer, in the model's own frame and format and with
        the sample's thought, or a whole response as it stands.

        Without `thinks` its thinking is left out; where the answer alone is to be learned, what comes before it is
        given, as a trigger is.

        Raises:
            UserError: the response has no answer to be learned alone.
        """
        if isinstance(demonstration, str):
            text, kind = demonstration, prompt.sample.target.answer_type
        else:
            text, kind = self._render_answer(prompt, demonstration), demonstration.answer_type
        if not with_thinking:
            text = self.grammar.strip_thinking(text)
        segments = self._demonstration_segments(prompt, text, loss_on)
        return Rollout(
            prompt=prompt,
            index=0,
            segments=segments,
            text=text,
            answer=self.grammar.parse(text, kind),
            finish_reason=FinishReason.EOS,
            sampling_params=SamplingParams(max_new_tokens=sum(len(segment.token_ids) for segment in segments)),
        )

    def _render_answer(self, prompt: Prompt, answer: Target) -> str:
        if answer.coordinate_system is not None:
            convert = partial(
                prompt.resize_maps[answer.media_index].convert,
                source=answer.coordinate_system,
                target=prompt.coordinate_system,
            )
            value = convert_coordinates(answer.answer_type, validate_value(answer.answer_type, answer.value), convert)
            answer = Target(
                answer_type=answer.answer_type,
                value=value,
                coordinate_system=prompt.coordinate_system,
                media_index=answer.media_index,
            )
        return self.grammar.render(answer, prompt.sample.thinking)

    def _demonstration_segments(
        self, prompt: Prompt, text: str, learn: Literal["response", "answer"]
    ) -> tuple[Segment, ...]:
        """A response's tokens and EOS, in segments that end where it calls a tool; a token that the answer begins
        within belongs to it.
        """
        answer = self.grammar.find_answer_opening(text) if learn == "answer" else 0
        if answer is None:
            raise UserError(f"sample {prompt.sample.id}: the response {text[:60]!r} has no answer to be learned alone")
        segments: list[Segment] = []
        for start, turn in split_turns(text):
            words = self.tokenizer(
                turn, add_special_tokens=False, split_special_tokens=True, return_offsets_mapping=True
            )
            given = sum(start + end <= answer for _, end in words.offset_mapping)
            eos = [self.tokenizer.eos_token_id] if start + len(turn) == len(text) else []
            parts = ((words.input_ids[:given], Author.FORCED), (words.input_ids[given:] + eos, Author.DEMONSTRATION))
            segments += [_unsampled_segment(ids, author) for ids, author in parts if ids]
        return tuple(segments)

    def encode(self, sample: Sample) -> EncodedPrompt:
        """What `ask` keeps, made anew. Raises as `Encoder.encode`."""
        return self.encoder.encode(sample)

    def get_cached(self, sample: Sample) -> EncodedPrompt | None:
        """The feed of a sample, if it is in the cache."""
        feed = self._cache.get(sample.id)
        # Two sets of data may use one id for two samples.
        return feed if feed is not None and feed.prompt.sample is sample else None

    def retain(self, samples: Sequence[Sample], encoded: Sequence[EncodedPrompt]) -> None:
        """Keep the feeds of a step's samples, whatever their size, until those of `held_steps` later ones are held."""
        with self._lock:
            self._retained_ids.append(frozenset(sample.id for sample in samples))
            for sample, feed in zip(samples, encoded, strict=True):  # one from another process has a copy of its own
                self._put_in_cache(replace(feed, prompt=replace(feed.prompt, sample=sample)))

    def _decode_segments(self, segments: Sequence[Segment]) -> str:
        return self.decode([token for segment in segments for token in segment.token_ids])

    def _get_encoded(self, sample: Sample) -> EncodedPrompt:
        with self._lock:
            feed = self.get_cached(sample)
            return self._put_in_cache(self.encode(sample) if feed is None else feed)

    def _put_in_cache(self, encoded: EncodedPrompt) -> EncodedPrompt:
        """Put a feed last in the cache; the first ones leave it when it is full."""
        before = self._cache.pop(encoded.prompt.sample.id, None)
        self._cached_bytes += encoded.tensors.nbytes - (before.tensors.nbytes if before else 0)
        self._cache[encoded.prompt.sample.id] = encoded
        for key in list(self._cache)[:-1] if self._cached_bytes > _CACHE_BYTES else ():
            if self._cached_bytes > _CACHE_BYTES and not any(key in step for step in self._retained_ids):
                self._cached_bytes -= self._cache.pop(key).tensors.nbytes
        return encoded


def _unsampled_segment(ids: Sequence[int], author: Author) -> Segment:
    return Segment(token_ids=tuple(ids), logprobs=(0.0,) * len(ids), author=author)


def _last_continuation_start(segments: Sequence[Segment]) -> int | None:
    """The segment from which on a response counts that was made to go on: its last trigger, or what follows a tool."""
    starts = {Author.FORCED: 0, Author.ENVIRONMENT: 1}
    return max((place + starts[s.author] for place, s in enumerate(segments) if s.author in starts), default=None)
