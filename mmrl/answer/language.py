"""Facts of language that the grammars of rewards and of benchmarks share.

All but `ANSWER_LEAD` are alternatives of a regular expression, to be put between brackets or among others.
"""

from typing import Final

ARTICLES: Final = "an?|the"
CONCLUSIONS: Final = "so|thus|hence|therefore"
REASONS: Final = "because|since|as"
HEDGES: Final = "maybe|perhaps|possibly|probably"
WRONG: Final = "wrong|incorrect|false"
CHOICE_NOUNS: Final = "option|choice|answer"
CHOICE_VERBS: Final = "choose|select|pick|go with"
LATEX_TEXT: Final = "text|textbf|mathrm|mathbf"  # commands around letters or words
ANSWER_LEAD: Final = (
    rf"(?:\*\*)?(?:(?:{CONCLUSIONS})\b,? ?)?"
    r"(?:(?:the |my )?(?:final |correct )?answer\b(?: is)?\s*[:=]?|(?:the|its) (?:(?!not)[a-z]+ ){1,5}?is )?"
    r"(?:\*\*)?\s*"
)
"""Pattern of what may come before an answer: "So ", "The final answer is ", "The area is " and "**Answer:** "."""
