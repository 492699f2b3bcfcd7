"""Detection of rollouts of earlier steps whose images or videos have changed on disk since.

Rollouts are kept as references and tokens, without pixels. Before an old rollout is trained on, its prompt is built
again: if the pixels differ, its recorded log-probs belong to another input.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence

from mmrl.types import Prompt, Sample, UserError

MediaProblemFinder = Callable[[Sequence[Prompt]], Mapping[str, str]]
"""Returns what is wrong with the media of prompts, by prompt digest; a prompt without a problem is left out."""


def find_media_problems(build_prompt: Callable[[Sample], Prompt], prompts: Sequence[Prompt]) -> dict[str, str]:
    """Build each prompt again, and return why it failed or came out different, by prompt digest."""
    problems = {}
    for prompt in prompts:
        try:
            if build_prompt(prompt.sample).digest != prompt.digest:
                problems[prompt.digest] = "its media changed while the run was using them"
        except UserError as error:
            problems[prompt.digest] = str(error)
    return problems


class ChangedMediaDetector:
    """Finds prompts of earlier steps whose media are no longer what they were, and warns about each."""

    def __init__(self, find_problems: MediaProblemFinder, warn: Callable[[str], None]) -> None:
        self._find_problems, self._warn = find_problems, warn

    def find_changed_digests(self, prompts: Iterable[Prompt]) -> set[str]:
        """Return the digests of the prompts that cannot be used any more; prints one warning for each."""
        by_digest = {prompt.digest: prompt for prompt in prompts}
        problems = self._find_problems(list(by_digest.values()))
        for digest, problem in problems.items():
            sample = by_digest[digest].sample
            self._warn(f"sample {sample.id}: {problem}; its rollouts of earlier steps are dropped")
        return set(problems)
