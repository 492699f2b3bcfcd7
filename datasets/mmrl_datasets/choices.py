"""Options of multiple choice questions: their letters, and how a question lists them."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final

LETTERS: Final = "ABCDEFGHIJKLMNOPQRSTUVWXYZ"


def format_choices(choices: Iterable[str]) -> str:
    r"""Return the lines that list the choices below a question, such as `"\nA. cat\nB. dog"`."""
    return "".join(f"\n{letter}. {choice}" for letter, choice in zip(LETTERS, choices, strict=False))
