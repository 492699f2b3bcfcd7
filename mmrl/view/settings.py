"""Settings of a run for the page, with secrets masked."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Any, Final

from mmrl.config import flatten_settings

MASK: Final = "••••"
# The last word of a key under which a secret may be. Numbers under such keys (`max_new_tokens`) are shown.
_SECRET_KEY: Final = re.compile(
    r"(?:^|[._-])(?:key|apikey|token|secret|password|passwd|pwd|credentials?|auth|authorization|cookie)s?$",
    re.IGNORECASE,
)
_USERINFO: Final = re.compile(r"(?<=://)[^/\s@]+(?=@)")
_SECRET_PARAMETER: Final = re.compile(r"(?i)([?&;](?:[\w-]*(?:key|token|secret|password|sig|signature))=)[^&\s]+")
# Keys of services that begin with a mark, wherever they are written.
_KNOWN_KEY: Final = re.compile(r"\b(?:hf_|sk-|ghp_|wandb_v1_|xox[abp]-)[A-Za-z0-9_-]{12,}|\bBearer\s+\S+")


def list_settings(settings: Mapping[str, Any]) -> list[list[str]]:
    """Return dotted path and text of every setting, secrets masked."""
    rows = []
    for path, value in flatten_settings(dict(settings)).items():
        text = value if isinstance(value, str) else json.dumps(value)
        rows.append([path, mask_setting(path, text) if isinstance(value, str) else text])
    return rows


def mask_setting(path: str, text: str) -> str:
    """Return the text of a setting without the secrets in it: keys, tokens, passwords, and users in URLs."""
    # In a list, the key is before the index.
    if text and _SECRET_KEY.search(re.sub(r"(\.\d+)+$", "", path)):
        return MASK
    text = _USERINFO.sub(MASK, text)
    text = _SECRET_PARAMETER.sub(rf"\1{MASK}", text)
    return _KNOWN_KEY.sub(MASK, text)
