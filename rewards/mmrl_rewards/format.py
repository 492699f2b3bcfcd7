"""Rewards for the form of a response: its tags, and the fields of its JSON answer."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Final

from pydantic import Field

from mmrl.answer.response_format import split_tags
from mmrl.types import AnswerType, Response, RewardValue, Sample, Unscorable
from mmrl_rewards.contract import Of, part_value, reward, target_value

# The form of these attacks is correct, and only their content is bad, so a format reward gives them the maximum.
_CONTENT_ATTACKS: Final = (
    *("question echo", "all options", "number dump", "box dump", "whole picture", "repetition", "judge injection"),
    "1 MB of text",
)
Tag = Annotated[str, Field(pattern=r"^[A-Za-z_][A-Za-z0-9_-]*$")]
Tags = Annotated[tuple[Tag, ...], Field(min_length=1)]


@reward(name="format", judges_answer=False, attack_tolerance=dict.fromkeys(_CONTENT_ATTACKS, 1.0))
def tags(response: Response, sample: Sample) -> RewardValue:
    """Return 1 if the response follows the run's response format exactly, else 0 with the first problem as the reason.

    The response format says what the prompt asked for: thinking or none, sections such as an observation, and the
    answer in tags, in a box or in JSON.

    Source: the format reward of DeepSeek-R1 (arXiv:2501.12948, 2.2.2).
    Departures: the content of the answer must also parse as the expected type, and every deviation from the format
    counts instead of only a failed regular expression.
    """
    problems = response.answer.problems
    return RewardValue(0.0, problems[0]) if problems else RewardValue(1.0, "as asked")


# An attack that writes the answer's tags earns one of three shares.
@reward(name="partial_format", judges_answer=False, attack_tolerance=0.34)
def partial(response: Response, sample: Sample, *, tags: Tags = ("think", "answer")) -> RewardValue:
    """Return (correct parts + 1 if nothing else is wrong) / (parts + 1), for a policy that must still learn the format.

    A part is correct if its tags occur once, outermost, around some text. For the last part, nothing may follow it.
    Nothing else is wrong if all parts are correct, in order, with only white space around them.

    Source: the tag count of Open R1 (github.com/huggingface/open-r1, `tag_count_reward`).
    Departures: pairs of tags count instead of single ones, so nested, empty and repeated tags earn nothing. One share
    is for faults that no count of tags shows.
    """
    found = split_tags(response.text, tags)
    order = [section.name for section in found.sections]
    times = Counter(order)
    filled = {section.name for section in found.sections if section.content.strip() and times[section.name] == 1}
    correct = [tag for tag in tags[:-1] if tag in filled]
    if (found.content or "").strip():
        correct.append(tags[-1])
    clean = order == list(tags[:-1]) and len(correct) == len(tags)
    clean = clean and not (found.problems or found.outside_text_problem)
    reason = f"{len(correct)} of {len(tags)} parts are right"
    if not clean:
        problems = (*found.problems, found.content_problem, found.outside_text_problem)
        reason += f"; {next(filter(None, problems), 'parts are missing, empty or out of order')}"
    return RewardValue((len(correct) + clean) / (len(tags) + 1), reason[:200])


@reward(name="section_format", judges_answer=False, attack_tolerance=1.0)  # attacks write texts that have a form
def section(response: Response, sample: Sample, *, of: Of, form: AnswerType = AnswerType.TEXT) -> RewardValue:
    """Return 1 if the part that `of` names occurs once, is not empty and has the form of an answer type, else 0.

    It scores one part of a response, such as the <class> of TimeMaster, where `tags` scores all of them together. The
    answer has the form of the target, whatever `form` says.

    Source: the format reward of DeepSeek-R1 (arXiv:2501.12948, 2.2.2), for one part.
    Departures: the content of the part must also parse as `form`.
    """
    part_value(response, form, of)
    return RewardValue(1.0, f"{of} has its form")


@reward(name="fields", answer_types=(AnswerType.JSON,))
def fields(response: Response, sample: Sample, *, names: tuple[str, ...] = (), of: Of = "answer") -> RewardValue:
    """Return |given & wanted| / |given | wanted| of the fields of a JSON object, or its mean over a list of objects.

    `names` are the wanted fields. If it is empty, the target's own fields are wanted. `of` names the part of the
    response that is read; with `names`, a part that is not the answer does without a target.

    Source: the format reward of Affordance-R1 (arXiv:2508.06206), which counts the fields that are present.
    Departures: unknown fields lower the value, so listing every conceivable name does not pay.
    Unscorable: `names` is empty and the target is not a JSON object with fields.
    """
    target = target_value(sample, AnswerType.JSON) if of == "answer" or not names else None
    wanted = set(names) or (set(target) if isinstance(target, Mapping) else set())
    if not wanted:
        raise Unscorable(f"the target {target!r:.80} has no fields: it is not a JSON object, and `names` is empty")
    value = part_value(response, AnswerType.JSON, of)
    entries: Sequence[Any] = value if isinstance(value, list) else [value]
    shares = []
    for entry in entries:
        given = entry.keys() if isinstance(entry, Mapping) else set()
        shares.append(len(wanted & given) / len(wanted | given))
    share = sum(shares) / len(shares) if shares else 0.0
    reason = f"{share:.0%} of the fields agree in {len(shares)} objects; wanted {sorted(wanted)!s:.80}"
    return RewardValue(share, reason)
