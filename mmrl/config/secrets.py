"""Hides secrets in settings that are shown to others: on the page of a run and in trackers."""

from __future__ import annotations

import re
from typing import Final

MASK: Final = "••••"
# Matches a dotted path whose last word, before the index in a list, suggests a secret.
_SECRET_KEY: Final = re.compile(
    r"(?i)(?:^|[._-])(?:key|apikey|token|secret|password|passwd|pwd|credentials?|auth|authorization|cookie)s?(\.\d+)*$"
)
_USERINFO: Final = re.compile(r"(?<=://)[^/\s@]+(?=@)")
_SECRET_PARAMETER: Final = re.compile(r"(?i)([?&;](?:[\w-]*(?:key|token|secret|password|sig|signature))=)[^&\s]+")
# API keys that their prefix gives away, anywhere in a text.
_KNOWN_KEY: Final = re.compile(r"\b(?:hf_|sk-|ghp_|wandb_v1_|xox[abp]-)[A-Za-z0-9_-]{12,}|\bBearer\s+\S+")


def mask_secret(path: str, value: object) -> object:
    """Return the value of the setting at a dotted path, with keys, tokens, passwords and users in URLs masked.

    Only text is masked: a number, such as `max_new_tokens`, is not a secret.
    """
    if not isinstance(value, str):
        return value
    if value and _SECRET_KEY.search(path):
        return MASK
    text = _SECRET_PARAMETER.sub(rf"\1{MASK}", _USERINFO.sub(MASK, value))
    return _KNOWN_KEY.sub(MASK, text)
