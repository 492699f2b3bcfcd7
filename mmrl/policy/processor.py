"""The asker: prompts of samples, and their tensors for as long as they are needed."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from functools import partial

from mmrl.answer import checked, reframed
from mmrl.batch import PromptTensors
from mmrl.policy.encoder import Encoder, Feed
from mmrl.types import Author, Finish, Prompt, Rollout, Sample, SamplingLaw, Segment, Target, UserError

_CACHE_BYTES = 2**30


class QwenProcessor:
    """Asks samples; every picture is opened, resized and cut into patches once.

    Patches of recent prompts stay in a cache of bounded size; a prompt that has left it is processed again and must
    come out with the same digest.
    """

    def __init__(self, encoder: Encoder) -> None:
        self.encoder = encoder
        self.hf = encoder.hf
        self.tokenizer = encoder.hf.tokenizer
        self.grammar = encoder.grammar
        self.placeholders = encoder.placeholders
        self._cache: OrderedDict[str, Feed] = OrderedDict()
        self._cached_bytes = 0

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

    def decode(self, ids: Sequence[int]) -> str:
        """Text of sampled ids, without special tokens."""
        return str(self.tokenizer.decode(ids, skip_special_tokens=True))

    def demonstrate(self, prompt: Prompt, answer: Target) -> Rollout:
        """The response a teacher would give: `answer` in the model's own frame and format, ended by EOS."""
        if answer.frame is not None:
            convert = partial(prompt.resizes[answer.medium].convert, source=answer.frame, target=prompt.frame)
            value = reframed(answer.kind, checked(answer.kind, answer.value), convert)
            answer = Target(kind=answer.kind, value=value, frame=prompt.frame, medium=answer.medium)
        text = self.grammar.render(answer, prompt.sample.thought)
        words = self.tokenizer(text, add_special_tokens=False, split_special_tokens=True).input_ids
        ids = (*words, self.tokenizer.eos_token_id)
        segment = Segment(ids=ids, logps=(0.0,) * len(ids), author=Author.TEACHER)
        return Rollout(
            prompt=prompt,
            index=0,
            segments=(segment,),
            text=text,
            answer=self.grammar.parse(text, answer.kind),
            finish=Finish.EOS,
            law=SamplingLaw(max_new_tokens=len(ids)),
        )

    def _feed(self, sample: Sample) -> Feed:
        feed = self._cache.pop(sample.id, None)
        if feed is None or feed.prompt.sample is not sample:  # two sets of data may use one id for two samples
            self._cached_bytes -= feed.tensors.nbytes if feed else 0
            feed = self.encoder.encode(sample)
            self._cached_bytes += feed.tensors.nbytes
        self._cache[sample.id] = feed
        while self._cached_bytes > _CACHE_BYTES and len(self._cache) > 1:
            self._cached_bytes -= self._cache.popitem(last=False)[1].tensors.nbytes
        return feed
