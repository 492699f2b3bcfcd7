"""The asker: prompts of samples, and their tensors for as long as they are needed."""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import Literal

from mmrl.answer import checked, reframed
from mmrl.answer.tool_calls import turns
from mmrl.policy.batch import PromptTensors
from mmrl.policy.encoder import Encoder, Feed
from mmrl.types import (
    Author,
    Finish,
    MediaRef,
    Prompt,
    Rollout,
    Sample,
    SamplingLaw,
    Segment,
    Target,
    UserError,
    View,
)
from mmrl.utils.picklable_lock import Turns

_CACHE_BYTES = 2**30
_SHOWN_BYTES = 2**28


class QwenProcessor:
    """Asks samples; every picture is opened, resized and cut into patches once.

    Patches of recent prompts stay in a cache of bounded size; a prompt that has left it is processed again and must
    come out with the same digest. Those of the last `held_steps` steps stay whatever their size. Threads take turns.
    """

    def __init__(self, encoder: Encoder, *, held_steps: int = 1) -> None:
        self.encoder = encoder
        self.hf = encoder.hf
        self.tokenizer = encoder.hf.tokenizer
        self.grammar = encoder.grammar
        self.placeholders = encoder.placeholders
        self._cache: OrderedDict[str, Feed] = OrderedDict()
        self._cached_bytes = 0
        self._held: deque[frozenset[str]] = deque(maxlen=held_steps)
        self._shown: OrderedDict[str, PromptTensors] = OrderedDict()
        self._shown_bytes = 0
        self._turns = Turns()

    def ask(self, sample: Sample) -> Prompt:
        """The sample as the model reads it.

        Raises:
            UserError: as `Encoder.encode`.
        """
        return self._feed(sample).prompt

    def tensors(self, prompt: Prompt) -> PromptTensors:
        """What the model's forward needs of a prompt.

        Raises:
            UserError: as `Encoder.encode`, or its media are not what they were when it was asked.
        """
        feed = self._feed(prompt.sample)
        if feed.prompt.digest != prompt.digest:
            raise UserError(
                f"sample {prompt.sample.id}: its media changed while the run was using them "
                f"(digest {prompt.digest[:12]} became {feed.prompt.digest[:12]}); restore the files"
            )
        return feed.tensors

    def show(self, ref: MediaRef) -> Segment:
        """A medium as a tool shows it within a response. Raises UserError as `Encoder.show`."""
        with self._turns:
            showing = self.encoder.show(ref)
            segment = showing.segment
            assert segment.view is not None
            before = self._shown.pop(segment.view.digest, None)
            self._shown[segment.view.digest] = showing.tensors
            self._shown_bytes += showing.tensors.nbytes - (before.nbytes if before else 0)
            while len(self._shown) > 1 and self._shown_bytes > _SHOWN_BYTES:
                self._shown_bytes -= self._shown.popitem(last=False)[1].nbytes
            return segment

    def seen(self, view: View) -> PromptTensors:
        """What the model's forward needs of a medium that a tool showed; positions count from its first token.

        Raises:
            UserError: as `Encoder.show`, or it is not what it was when it was shown.
        """
        with self._turns:
            if view.digest not in self._shown:
                again = self.show(view.ref).view
                if again is None or again.digest != view.digest:
                    raise UserError(f"{view.ref.path}: changed since a tool showed it; restore the file")
            self._shown.move_to_end(view.digest)
            return self._shown[view.digest]

    def decode(self, ids: Sequence[int]) -> str:
        """Text of sampled ids, without special tokens."""
        with self._turns:
            return str(self.tokenizer.decode(ids, skip_special_tokens=True))

    def tokens(self, text: str, *, marks: bool = False) -> tuple[int, ...]:
        """Ids of a text; with `marks`, those of the chat template are among them."""
        with self._turns:
            return tuple(self.tokenizer(text, add_special_tokens=False, split_special_tokens=not marks).input_ids)

    def read(self, rollout: Rollout) -> Rollout:
        """The rollout with the text and the answer that its segments amount to.

        Once a trigger or a tool has spoken, what stands before does not count as an answer, and what a tool says never.
        """
        kind, second = rollout.prompt.sample.target.kind, _second(rollout.segments)
        if second is None:
            text = self._text(rollout.segments)
            return replace(rollout, text=text, answer=self.grammar.parse(text, kind), right=None)
        draft, text = self._text(rollout.segments[:second]), self._text(rollout.segments[second:])
        answer = self.grammar.parse_second(draft, text, kind)
        return replace(rollout, text=draft + text, answer=answer, right=None)

    def draft_of(self, rollout: Rollout) -> str | None:
        """What stands before a response counts: up to its last trigger or tool; None where there is neither."""
        second = _second(rollout.segments)
        return None if second is None else self._text(rollout.segments[:second])

    def demonstrate(
        self,
        prompt: Prompt,
        lesson: Target | str,
        *,
        thinks: bool = True,
        learn: Literal["response", "answer"] = "response",
    ) -> Rollout:
        """The response a teacher would give, ended by EOS: a right answer, in the model's own frame and format and with
        the sample's thought, or a whole response as it stands.

        Without `thinks` its thinking is left out; where the answer alone is to be learned, what comes before it is
        given, as a trigger is.

        Raises:
            UserError: the response has no answer to be learned alone.
        """
        if isinstance(lesson, str):
            text, kind = lesson, prompt.sample.target.kind
        else:
            text, kind = self._written(prompt, lesson), lesson.kind
        if not thinks:
            text = self.grammar.without_thinking(text)
        segments = self._taught(prompt, text, learn)
        return Rollout(
            prompt=prompt,
            index=0,
            segments=segments,
            text=text,
            answer=self.grammar.parse(text, kind),
            finish=Finish.EOS,
            law=SamplingLaw(max_new_tokens=sum(len(segment.ids) for segment in segments)),
        )

    def _written(self, prompt: Prompt, answer: Target) -> str:
        if answer.frame is not None:
            convert = partial(prompt.resizes[answer.medium].convert, source=answer.frame, target=prompt.frame)
            value = reframed(answer.kind, checked(answer.kind, answer.value), convert)
            answer = Target(kind=answer.kind, value=value, frame=prompt.frame, medium=answer.medium)
        return self.grammar.render(answer, prompt.sample.thought)

    def _taught(self, prompt: Prompt, text: str, learn: Literal["response", "answer"]) -> tuple[Segment, ...]:
        """A response's tokens and EOS, in segments that end where it calls a tool; a token that the answer begins
        within belongs to it.
        """
        answer = self.grammar.answer_start(text) if learn == "answer" else 0
        if answer is None:
            raise UserError(f"sample {prompt.sample.id}: the response {text[:60]!r} has no answer to be learned alone")
        segments: list[Segment] = []
        for start, turn in turns(text):
            words = self.tokenizer(
                turn, add_special_tokens=False, split_special_tokens=True, return_offsets_mapping=True
            )
            given = sum(start + end <= answer for _, end in words.offset_mapping)
            eos = [self.tokenizer.eos_token_id] if start + len(turn) == len(text) else []
            parts = ((words.input_ids[:given], Author.TRIGGER), (words.input_ids[given:] + eos, Author.TEACHER))
            segments += [_unsampled(ids, author) for ids, author in parts if ids]
        return tuple(segments)

    def process(self, sample: Sample) -> Feed:
        """What `ask` keeps, made anew. Raises as `Encoder.encode`."""
        return self.encoder.encode(sample)

    def cached(self, sample: Sample) -> Feed | None:
        """The feed of a sample, if it is in the cache."""
        feed = self._cache.get(sample.id)
        # Two sets of data may use one id for two samples.
        return feed if feed is not None and feed.prompt.sample is sample else None

    def hold(self, samples: Sequence[Sample], feeds: Sequence[Feed]) -> None:
        """Keep the feeds of a step's samples, whatever their size, until those of `held_steps` later ones are held."""
        with self._turns:
            self._held.append(frozenset(sample.id for sample in samples))
            for sample, feed in zip(samples, feeds, strict=True):  # one from another process has a copy of its own
                self._keep(replace(feed, prompt=replace(feed.prompt, sample=sample)))

    def _text(self, segments: Sequence[Segment]) -> str:
        return self.decode([token for segment in segments for token in segment.ids])

    def _feed(self, sample: Sample) -> Feed:
        with self._turns:
            feed = self.cached(sample)
            return self._keep(self.process(sample) if feed is None else feed)

    def _keep(self, feed: Feed) -> Feed:
        """Put a feed last in the cache; the first ones leave it when it is full."""
        before = self._cache.pop(feed.prompt.sample.id, None)
        self._cached_bytes += feed.tensors.nbytes - (before.tensors.nbytes if before else 0)
        self._cache[feed.prompt.sample.id] = feed
        for key in list(self._cache)[:-1] if self._cached_bytes > _CACHE_BYTES else ():
            if self._cached_bytes > _CACHE_BYTES and not any(key in step for step in self._held):
                self._cached_bytes -= self._cache.pop(key).tensors.nbytes
        return feed


def _unsampled(ids: Sequence[int], author: Author) -> Segment:
    return Segment(ids=tuple(ids), logps=(0.0,) * len(ids), author=author)


def _second(segments: Sequence[Segment]) -> int | None:
    """The segment from which on a response counts that was made to go on: its last trigger, or what follows a tool."""
    starts = {Author.TRIGGER: 0, Author.ENV: 1}
    return max((place + starts[s.author] for place, s in enumerate(segments) if s.author in starts), default=None)
