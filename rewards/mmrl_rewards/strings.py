"""Text for rewards: normalised, split into words, and compared with one target or several.

All functions take time linear in the text.
"""

from __future__ import annotations

import re
import unicodedata
from functools import lru_cache

from mmrl.answer import validate_value
from mmrl.types import AnswerType, Sample, Unscorable
from mmrl.utils.messages import shorten
from mmrl_rewards.contract import Of, column_value, target_value

# Normalising a run of combining marks takes CPython time that grows with its square, so long runs that are not ASCII
# are cut. Nothing composes with an ASCII character that follows it: every other seam is exact.
_NORMALIZED_PIECE = re.compile(r"[\x00-\x7f]*[^\x00-\x7f]{0,200}")
_CJK = "\u3040-\u30ff\u3400-\u4dbf\u4e00-\u9fff\uf900-\ufaff"  # written without spaces: each character is a word
_WORD = re.compile(rf"[{_CJK}]|[^\W_{_CJK}]+")


def normalize(text: str) -> str:
    """Return a text in NFKC, stripped, with white space collapsed to single spaces."""
    if not text.isascii():
        text = "".join(unicodedata.normalize("NFKC", piece) for piece in _NORMALIZED_PIECE.findall(text))
    return " ".join(text.split())


def words(text: str) -> list[str]:
    """Return the words of letters and digits, in lower case without punctuation. Each ideograph and kana is a word."""
    return _WORD.findall(normalize(text).casefold())


def normalized_targets(sample: Sample, column: str | None, of: Of = "answer") -> tuple[str, ...]:
    """Return the correct texts, normalised: the target, and those in `sample.meta[column]` if a column is named.

    The target is a correct text of the answer only. If `of` names another part and a column is named, the column holds
    all correct texts, as one text or a list, and the target may be of any type.

    Raises:
        Unscorable: one is not text, or is empty once normalised; there is no such column, or it is not a list.
    """
    targets = [] if column is not None and of != "answer" else [target_value(sample, AnswerType.TEXT)]
    if column is not None:
        listed = column_value(sample, column)
        if of != "answer" and isinstance(listed, str):
            listed = [listed]
        try:
            targets.extend(validate_value(AnswerType.LIST, listed))
        except ValueError as error:
            raise Unscorable(f"column {column!r} is {error}: {listed!r:.80}") from error
    if not targets:
        raise Unscorable(f"column {column!r} holds no text")
    normalized = tuple(map(_normalize_target, targets))
    if "" in normalized:
        raise Unscorable(f"the target {targets[normalized.index('')]!r:.80} is empty once normalised")
    return normalized


_normalize_target = lru_cache(maxsize=256)(normalize)  # siblings share their targets


def excerpt(text: str, max_chars: int = 40) -> str:
    """Return the start of a text in quotes, for a reason."""
    return repr(shorten(text, max_chars))
