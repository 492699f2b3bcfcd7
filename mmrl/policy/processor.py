"""Prompts of samples, with a cache of their tensors, and conversion between text and token ids."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from itertools import chain, groupby
from typing import Literal, TypeAlias

from mmrl.answer import check_opening, convert_coordinates, validate_value
from mmrl.answer.tool_calls import split_turns
from mmrl.policy.batch import PromptTensors
from mmrl.policy.encoder import EncodedPrompt, PromptEncoder
from mmrl.policy.picklable_lock import PicklableLock
from mmrl.types import (
    AnswerType,
    Author,
    ContentPart,
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
from mmrl.utils.byte_cache import ByteCache

LossOn: TypeAlias = Literal["response", "answer"]
_PromptContent: TypeAlias = tuple[tuple[ContentPart, ...], AnswerType]

_CACHE_BYTES = 2**30  # the patches of an image of 1000 x 1000 pixels take 24 MB
_TOOL_MEDIA_CACHE_BYTES = 2**28
_MAX_CHARACTER_TOKENS = 4  # a character has four bytes at most, and a token one at least


class PromptProcessor:
    """Builds prompts and demonstrations, parses rollouts, and provides the tensors of both to sampler and learner.

    An image is opened, resized and cut into patches once: a cache of bounded size holds recent prompts. The key of a
    prompt is its content, not its sample's id. A prompt that has left the cache is encoded again, and must have the
    same digest.
    """

    def __init__(self, encoder: PromptEncoder, *, retained_steps: int = 1) -> None:
        """Start with empty caches; prompts of the last `retained_steps` steps stay."""
        self.encoder = encoder
        self.hf_processor = encoder.hf_processor
        self.tokenizer = encoder.hf_processor.tokenizer
        self.response_format = encoder.response_format
        self.placeholders = encoder.placeholders
        self._cache: ByteCache[_PromptContent, EncodedPrompt] = ByteCache(_CACHE_BYTES)
        self._retained: deque[tuple[int, set[_PromptContent]]] = deque(maxlen=retained_steps)
        self._pieces: dict[tuple[int, ...], str] = {}  # text of single tokens, or of a few that share a character
        self._tool_media: ByteCache[str, PromptTensors] = ByteCache(_TOOL_MEDIA_CACHE_BYTES)
        # Asynchronous rollouts build prompts in a thread while the learner reads the tensors of others.
        self._lock = PicklableLock()

    def build(self, sample: Sample) -> Prompt:
        """Return the prompt of a sample.

        Raises:
            UserError: an image or video cannot be used, the prompt is too long, or its text has a special token.
        """
        return self.encode(sample).prompt

    def encode(self, sample: Sample) -> EncodedPrompt:
        """Return the encoded prompt of a sample, from the cache if it is there. Raises as `build`."""
        with self._lock:
            content = _prompt_content(sample)
            encoded = self._cache.get(content)
            if encoded is None:
                encoded = self.encoder.encode(sample)
                self._cache.put(content, encoded, encoded.tensors.nbytes, is_pinned=self._is_retained)
            return _with_sample(encoded, sample)

    def prompt_tensors(self, prompt: Prompt) -> PromptTensors:
        """Return the tensors that the model's forward needs for a prompt.

        Raises:
            UserError: as `build`, or an image or video has changed since the prompt was built.
        """
        encoded = self.encode(prompt.sample)
        if encoded.prompt.digest != prompt.digest:
            raise UserError(
                f"sample {prompt.sample.id}: its media changed while the run was using them "
                f"(digest {prompt.digest[:12]} became {encoded.prompt.digest[:12]}); restore the files"
            )
        return encoded.tensors

    def build_tool_segment(self, ref: MediaRef) -> Segment:
        """Return the segment by which a tool shows an image or video within a response.

        Raises:
            UserError: it cannot be used.
        """
        with self._lock:
            segment, tensors = self.encoder.encode_tool_media(ref)
            assert segment.observation is not None
            self._tool_media.put(segment.observation.digest, tensors, tensors.nbytes)
            return segment

    def tool_media_tensors(self, observation: MediaObservation) -> PromptTensors:
        """Return the tensors of an image or video that a tool showed; positions count from its first token.

        Raises:
            UserError: it cannot be used, or has changed since it was shown.
        """
        with self._lock:
            tensors = self._tool_media.get(observation.digest)
            if tensors is None:
                self.build_tool_segment(observation.ref)
                tensors = self._tool_media.get(observation.digest)
            # `build_tool_segment` stored the tensors by the file's current digest. If it has changed, none are found.
            if tensors is None:
                raise UserError(f"{observation.ref.path}: changed since a tool showed it; restore the file")
            return tensors

    def check_media(self, rollout: Rollout) -> None:
        """Check that what the model saw in a rollout of an earlier step is the same today.

        Raises:
            UserError: an image or video cannot be used, or has changed.
        """
        self.prompt_tensors(rollout.prompt)
        for observation in rollout.observations:
            self.tool_media_tensors(observation)

    def decode(self, ids: Sequence[int]) -> str:
        """Return the text of token ids, without special tokens."""
        # `tokenize` sets an option of the Rust tokenizer; a thread that decodes meanwhile raises "Already borrowed".
        with self._lock:
            return str(self.tokenizer.decode(ids, skip_special_tokens=True))

    def tokenize(self, text: str, *, parse_special: bool = False) -> tuple[int, ...]:
        """Return the token ids of a text; special tokens written in it count as such only with `parse_special`."""
        with self._lock:
            encoding = self.tokenizer(text, add_special_tokens=False, split_special_tokens=not parse_special)
            return tuple(encoding.input_ids)

    def parse_rollout(self, rollout: Rollout) -> Rollout:
        """Return the rollout with the text of its segments and the answer parsed from it.

        If the prompt ends with an opened thought, the text begins with it. The answer must come after the last forced
        trigger or tool result; the text of a tool is never an answer.
        """
        answer_type = rollout.prompt.sample.target.answer_type
        start = _last_continuation_start(rollout.segments)
        text = self.encoder.response_opening + self.decode_segments(rollout.segments[:start])
        if start is None:
            answer = self.response_format.parse(text, answer_type)
        else:
            continuation = self.decode_segments(rollout.segments[start:])
            answer = self.response_format.parse_continuation(text, continuation, answer_type)
            text += continuation
        # `is_correct` is reset, because it judged an earlier state of the response.
        return replace(rollout, text=text, answer=answer, is_correct=None)

    def text_before_continuation(self, rollout: Rollout) -> str | None:
        """Return the text before the last continuation: up to a forced trigger, or to the end of a tool's result.

        None if the response was not continued.
        """
        start = _last_continuation_start(rollout.segments)
        if start is None:
            return None
        return self.encoder.response_opening + self.decode_segments(rollout.segments[:start])

    def build_demonstration(
        self, prompt: Prompt, demonstration: Target | str, *, with_thinking: bool = True, loss_on: LossOn = "response"
    ) -> Rollout:
        """Return a demonstration as a rollout that ends with EOS.

        A `demonstration` that is a target is rendered in the response format, with the sample's thinking and in the
        model's own coordinates. A string is a whole response and stays as it is. Thinking is removed from both unless
        `with_thinking`. With `loss_on` "answer", the tokens before the answer are by DEMONSTRATION_PREFIX, which is
        never trained.

        Raises:
            UserError: `loss_on` is "answer", and the response has none.
        """
        if isinstance(demonstration, str):
            text, answer_type = demonstration, prompt.sample.target.answer_type
        else:
            text, answer_type = self._render_answer(prompt, demonstration), demonstration.answer_type
        if not with_thinking:
            text = self.response_format.strip_thinking(text)
        opening = self.encoder.response_opening
        check_opening(text, opening, prompt.sample.id)
        # The prompt already ends with the tag and perhaps a line break; the response must not repeat them.
        written = text.removeprefix(opening if text.startswith(opening) else opening.strip())
        segments = self._demonstration_segments(prompt, written, loss_on)
        text = opening + written
        return Rollout(
            prompt=prompt,
            index=0,
            segments=segments,
            text=text,
            answer=self.response_format.parse(text, answer_type),
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
            answer = replace(answer, value=value, coordinate_system=prompt.coordinate_system)
        return self.response_format.render(answer, prompt.sample.thinking)

    def _demonstration_segments(self, prompt: Prompt, text: str, loss_on: LossOn) -> tuple[Segment, ...]:
        """Return the segments of a response and its EOS; a segment ends after each tool call."""
        answer_start = self.response_format.find_answer_opening(text) if loss_on == "answer" else 0
        if answer_start is None:
            raise UserError(f"sample {prompt.sample.id}: the response {text[:60]!r} has no answer to train on")
        segments: list[Segment] = []
        for start, turn in split_turns(text):
            encoding = self.tokenizer(
                turn, add_special_tokens=False, split_special_tokens=True, return_offsets_mapping=True
            )
            # A token in which the answer begins belongs to the answer.
            num_before = sum(start + end <= answer_start for _, end in encoding.offset_mapping)
            prefix, trained = encoding.input_ids[:num_before], encoding.input_ids[num_before:]
            if start + len(turn) == len(text):
                trained = [*trained, self.tokenizer.eos_token_id]
            for ids, author in ((prefix, Author.DEMONSTRATION_PREFIX), (trained, Author.DEMONSTRATION)):
                if ids:
                    segments.append(Segment(token_ids=tuple(ids), logprobs=(0.0,) * len(ids), author=author))
        return tuple(segments)

    def is_cached(self, sample: Sample) -> bool:
        """Return True if the encoded prompt of a sample is in the cache."""
        with self._lock:
            return self._cache.get(_prompt_content(sample)) is not None

    def retain(self, samples: Sequence[Sample], encoded: Sequence[EncodedPrompt], *, step: int) -> None:
        """Cache encoded prompts that `step` took; they stay, whatever their size, for `retained_steps` steps."""
        with self._lock:
            # A step with several rounds calls this more than once.
            if not self._retained or self._retained[-1][0] != step:
                self._retained.append((step, set()))
            self._retained[-1][1].update(map(_prompt_content, samples))
            for sample, encoded_prompt in zip(samples, encoded, strict=True):
                # A prompt from a worker process holds a copy of the sample.
                stored = _with_sample(encoded_prompt, sample)
                num_bytes = stored.tensors.nbytes
                self._cache.put(_prompt_content(sample), stored, num_bytes, is_pinned=self._is_retained)

    def decode_segments(self, segments: Sequence[Segment]) -> str:
        """Return the text of segments, without special tokens."""
        return self.decode(list(chain.from_iterable(segment.token_ids for segment in segments)))

    def render_prompt(self, prompt: Prompt) -> str:
        """Return a prompt as text, with `⟨image: 256 tokens⟩` for neighbouring placeholders."""
        pieces: list[str] = []
        media_types = {self.placeholders.image_id: "image", self.placeholders.video_id: "video"}
        for media_type, run in groupby(prompt.token_ids, key=media_types.get):
            ids = list(run)
            if media_type is None:
                with self._lock:
                    pieces.append(self.tokenizer.decode(ids, skip_special_tokens=False))
                continue
            pieces.append(f"⟨{media_type}: {len(ids)} tokens⟩")
        return "".join(pieces)

    def find_token_ends(self, rollout: Rollout) -> list[int] | None:
        """Return where the text of each token ends in the text of a rollout, in characters.

        Tokens that share a character end before it, except the last of them. None if the tokens do not spell the text.
        """
        length = len(self.encoder.response_opening)
        ends = []
        pieces = [rollout.text[:length]]
        waiting: list[int] = []  # tokens whose bytes do not yet make a character
        for segment in rollout.segments:
            for token_id in segment.token_ids:
                waiting.append(token_id)
                piece = self._decode_cached(tuple(waiting))
                if not piece.endswith("\ufffd") or len(waiting) == _MAX_CHARACTER_TOKENS:
                    pieces.append(piece)
                    length += len(piece)
                    waiting = []
                ends.append(length)
        if waiting:
            pieces.append(self._decode_cached(tuple(waiting)))
            ends[-1] += len(pieces[-1])
        return ends if "".join(pieces) == rollout.text else None

    def _decode_cached(self, ids: tuple[int, ...]) -> str:
        if ids not in self._pieces:
            self._pieces[ids] = self.decode(ids)
        return self._pieces[ids]

    def _is_retained(self, content: _PromptContent) -> bool:
        return any(content in contents for _, contents in self._retained)


def _prompt_content(sample: Sample) -> _PromptContent:
    """Return all that a sample's prompt is made from."""
    # A dataset function may have given a list, which is no key.
    return tuple(sample.parts), sample.target.answer_type


def _with_sample(encoded: EncodedPrompt, sample: Sample) -> EncodedPrompt:
    """Return the encoded prompt of another sample with the same content, as that of a greedy response has."""
    if encoded.prompt.sample is sample:
        return encoded
    return replace(encoded, prompt=replace(encoded.prompt, sample=sample))


def _last_continuation_start(segments: Sequence[Segment]) -> int | None:
    """Return the index of the first segment that may hold the answer; None if nothing was forced or shown."""
    for index in reversed(range(len(segments))):
        match segments[index].author:
            case Author.FORCED:
                return index
            case Author.ENVIRONMENT:
                return index + 1
    return None
