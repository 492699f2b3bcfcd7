"""Was the response written as asked?"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Final

from pydantic import Field

from mmrl.answer.sections import split_tags
from mmrl.types import AnswerType, Response, RewardValue, Sample, Unscorable
from mmrl_rewards.contract import reward, target_value

_CONTENT_ATTACKS: Final = (
    *("question echo", "all options", "number dump", "box dump", "whole picture", "repetition", "judge injection"),
    "1 MB of text",
)
Tag = Annotated[str, Field(pattern=r"^[A-Za-z_][A-Za-z0-9_-]*$")]
Tags = Annotated[tuple[Tag, ...], Field(min_length=1)]


@reward(name="format", attack_tolerance=dict.fromkeys(_CONTENT_ATTACKS, 1.0))
def tags(response: Response, sample: Sample) -> RewardValue:
    """1 if the response meets the answer grammar exactly, else 0 with the first problem as the reason.

    The grammar of the run says what was asked: thinking or none, sections such as an observation, the answer in tags,
    in a box or in JSON. Source: the format reward of DeepSeek-R1 (arXiv:2501.12948, 2.2.2). Departures: the content of
    the answer must also read as the asked-for kind, and every departure from the grammar counts, not only a failed
    regular expression.
    """
    problems = response.answer.problems
    return RewardValue(0.0, problems[0]) if problems else RewardValue(1.0, "as asked")


@reward(name="partial_format", attack_tolerance=0.34)  # the answer's tags are one of three things asked for
def partial(response: Response, sample: Sample, *, tags: Tags = ("think", "answer")) -> RewardValue:
    """(parts that are right + 1 if nothing else is wrong) / (parts + 1), for a policy that has the format to learn.

    A part is right if its tags stand once, outermost, around something; the last one if nothing follows it, too.
    Nothing else is wrong if all are right, in order, with nothing but white space around them. Source: the tag count
    of Open R1 (github.com/huggingface/open-r1, `tag_count_reward`). Departures: pairs instead of single tags, so that
    nested, empty and repeated ones earn nothing, and a last share for what no count of tags sees.
    """
    found = split_tags(response.text, tags, tags[-1])
    order = [part.name for part in found.sections]
    times = Counter(order)
    full = {part.name for part in found.sections if part.content.strip() and times[part.name] == 1}
    right = [tag for tag in tags[:-1] if tag in full] + ([tags[-1]] if (found.content or "").strip() else [])
    clean = order == list(tags[:-1]) and len(right) == len(tags) and not (found.problems or found.outside_text_problem)
    flaw = next(
        filter(None, (*found.problems, found.content_problem, found.outside_text_problem)),
        "parts are missing, empty or out of order",
    )
    reason = f"{len(right)} of {len(tags)} parts are right{'' if clean else f'; {flaw}'}"
    return RewardValue((len(right) + clean) / (len(tags) + 1), reason[:200])


@reward(name="fields", answer_types=(AnswerType.JSON,))
def fields(response: Response, sample: Sample, *, names: tuple[str, ...] = ()) -> RewardValue:
    """|given & wanted| / |given | wanted| of the fields of a JSON object; the mean over a list of objects.

    Wanted are `names`, or the target's own fields if there are none. Source: the format reward of Affordance-R1
    (arXiv:2508.06206), which counts fields that are there. Departures: unknown fields cost, so that writing down every
    name one can think of does not pay.

    Raises:
        Unscorable: no names are given, and the target is not a JSON object with fields.
    """
    target = target_value(sample, AnswerType.JSON)
    wanted = set(names) or (set(target) if isinstance(target, Mapping) else set())
    if not wanted:
        raise Unscorable(f"the target {target!r:.80} has no fields: it is not a JSON object, and `names` is empty")
    value = response.answer.value
    if value is None:
        return RewardValue(0.0, response.answer.problems[0])
    entries: Sequence[Any] = value if isinstance(value, list) else [value]
    shares = [
        len(wanted & entry.keys()) / len(wanted | entry.keys()) if isinstance(entry, Mapping) else 0.0
        for entry in entries
    ]
    share = sum(shares) / len(shares) if shares else 0.0
    return RewardValue(
        share, f"{share:.0%} of the fields agree in {len(shares)} objects; wanted {sorted(wanted)!s:.80}"
    )
