r"""Reads the cells of a LaTeX table: an environment such as tabular, with what usually surrounds it.

Rules, colours and fonts are left out, as are the dollar signs of maths, which is compared as it is written. An empty
cell under a \multirow is part of it; under a rowspan, HTML does not write such a cell at all.
"""

from __future__ import annotations

import re
from collections import Counter
from typing import Final, NamedTuple

from mmrl_rewards import strings


class TableCell(NamedTuple):
    """Holds a cell's text and size."""

    text: str  # normalised
    colspan: int = 1  # columns that it spans
    rowspan: int = 1  # rows that it spans


_COMMENT = re.compile(r"(?<!\\)((?:\\\\)*)%.*\n?[ \t]*")
_BEGIN = re.compile(r"\\begin\s*\{(tabular[*xy]?|array|longtable)\}")
_SPEC_ARGUMENTS: Final = {"tabular*": 2, "tabularx": 2, "tabulary": 2}  # others have one
# One step of reading: an end of an environment, a command, an escaped character, or a single character.
_TOKEN = re.compile(r"\\(?P<end>begin|end)\s*\{[A-Za-z*]+\}|\\[A-Za-z@]+\*?|\\.|.", re.DOTALL)
_INNER_ENVIRONMENT = re.compile(
    r"\\begin\s*\{(?:tabular|array)\}(?:\[\w\])?\{[^{}]*\}|\\(?:begin|end)\s*\{[A-Za-z*]+\}"
)
_ROW_SPACE = re.compile(r"\*?(?:[ \t]*\[[^\[\]]*\])?")
_BRACKET = re.compile(r"\s*\[[^\[\]]*\]")
_GROUP_START = re.compile(r"\s*[\[{]")
_ARGUMENT_START = re.compile(r"\s*\S")
_CLOSING: Final = {"{": "}", "[": "]"}
_SPAN = re.compile(r"\s*\\multi(column|row(?!cell))")
_RULE = re.compile(
    r"\s*\\(?:(?:hline|hdashline|thickhline|endhead|endfirsthead|endfoot|endlastfoot|morecmidrules)(?![A-Za-z])"
    r"|(?:toprule|midrule|bottomrule|addlinespace)(?![A-Za-z])(?:\s*\[[^\]]*\])?"
    r"|(?:cline|hhline|cdashline|Xhline|noalign)\s*\{[^{}]*\}"
    r"|cmidrule\s*(?:\[[^\]]*\])?\s*(?:\([^)]*\))?\s*\{[^{}]*\}|specialrule\s*(?:\{[^{}]*\}\s*){3})"
)
# Commands, and how many of their arguments are not text. A further argument is text.
_LAYOUT: Final = {
    **dict.fromkeys(["cellcolor", "rowcolor", "columncolor", "color", "textcolor", "label", "hspace", "vspace"], 1),
    **dict.fromkeys(["rotatebox", "scalebox", "parbox", "arrayrulecolor", "fontsize", "multirowcell"], 1),
    "resizebox": 2,
    "rule": 2,
}
# Commands that change only how text looks, or its place.
_FONT = re.compile(
    r"(?:text|math)?(?:bf|it|sc|tt|rm|sf|md|up|sl|normal)|text|emph|underline|uline|mbox|makecell|thead|shortstack|em|bm"
    r"|boldsymbol|(?:bf|it|sc|tt|rm|sf|md|up)(?:series|shape|family)|normalfont|tiny|scriptsize|footnotesize|small"
    r"|normalsize|[lL]arge|LARGE|[hH]uge|centering|raggedright|raggedleft|arraybackslash|noindent|q?quad|hfill|strut"
)
_SPACES: Final = {"~", "\\ ", "\\,", "\\;", "\\:", "\\\\", "\\newline", "\\linebreak"}


def parse_latex_table(source: str) -> list[tuple[TableCell, ...]]:
    """Return the rows of the one table in a LaTeX text.

    Raises:
        ValueError: there is no table, more than one, text beside it, or braces that do not match.
    """
    source = _COMMENT.sub(r"\1", source)
    begin = _BEGIN.search(source)
    if begin is None:
        raise ValueError("no table")
    arguments, start = _read_arguments(source, begin.end(), _SPEC_ARGUMENTS.get(begin[1], 1))
    if not arguments:
        raise ValueError("a table without columns")
    rows, end = _split_rows(source, start, begin[1])
    _check_surroundings(source[: begin.start()] + source[end:])
    table: list[tuple[TableCell, ...]] = []
    rows_below: Counter[int] = Counter()  # by column, the rows that a cell above still covers
    for row in rows:
        cells: list[TableCell] = []
        columns = range(0)
        for content in row:
            cell = _parse_cell(content)
            columns = range(columns.stop, columns.stop + cell.colspan)
            is_covered = not cell.text and all(rows_below[index] > 0 for index in columns)
            if not is_covered:
                cells.append(cell)
            for index in columns:
                rows_below[index] = rows_below[index] - 1 if is_covered else cell.rowspan - 1
        table.append(tuple(cells))
    return table


def _split_rows(source: str, start: int, environment: str) -> tuple[list[list[str]], int]:
    """Return the cells of each row as written, and the place after the end of the table whose body begins at `start`.

    What is in braces or in another environment is part of its cell. Rules are left out.
    """
    rows: list[list[str]] = [[""]]
    braces = environments = 0
    place = start
    while token := _TOKEN.match(source, place):
        text, place = token[0], token.end()
        braces += (text == "{") - (text == "}")
        environments += (token["end"] == "begin") - (token["end"] == "end")
        if environments < 0 and braces == 0 and text.endswith(f"{{{environment}}}"):
            kept = [[_RULE.sub("", cell).strip() for cell in row] for row in rows]
            return [row for row in kept if row != [""]], place
        if environments < 0 or braces < 0:
            break
        if braces or environments:
            rows[-1][-1] += text
        elif text == "&":
            rows[-1].append("")
        elif text in ("\\\\", "\\tabularnewline", "\\cr"):
            space = _ROW_SPACE.match(source, place)
            place = space.end() if space else place
            rows.append([""])
        elif not token["end"]:
            rows[-1][-1] += text
    raise ValueError("a table that does not end, or braces that do not match")


def _check_surroundings(source: str) -> None:
    """Raise a ValueError if there is text, or a table, outside the arguments of commands."""
    if _BEGIN.search(source):
        raise ValueError("more than one table")
    place = 0
    while token := _TOKEN.match(source, place):
        place = token.end()
        if token[0].isalnum():
            raise ValueError("text beside the table")
        while token[0][0] == "\\" and (group := _GROUP_START.match(source, place)):
            place = _find_closing(source, group.end() - 1) + 1


def _parse_cell(content: str) -> TableCell:
    r"""Return a cell, whose \multicolumn and \multirow may be in either order."""
    spans = {"column": 1, "row": 1}
    for _ in range(2):
        span = _SPAN.match(content)
        if span is None:
            break
        arguments, _ = _read_arguments(content, span.end(), 3)
        spans[span[1]] = parse_span("".join(arguments[:1]).strip())
        content = arguments[2] if len(arguments) == 3 else ""
    text = strings.normalize(_plain_text(_INNER_ENVIRONMENT.sub(" ", content)))
    return TableCell(text, spans["column"], spans["row"])


def parse_span(text: str, max_digits: int = 2) -> int:
    """Return the number of columns or rows that a text names; as in HTML, anything but a positive one counts as 1."""
    return max(1, int(text)) if text.isascii() and text.isdigit() and len(text) <= max_digits else 1


def _read_arguments(source: str, place: int, count: int) -> tuple[list[str], int]:
    """Return up to `count` arguments of a command and the place after them. Those in brackets are left out."""
    found: list[str] = []
    while len(found) < count and (start := _ARGUMENT_START.match(source, place)):
        first = start.end() - 1
        last = _find_closing(source, first) if source[first] in _CLOSING else first
        if source[first] != "[":
            found.append(source[first + 1 : last] if last > first else source[first])
        place = last + 1
    return found, place


def _find_closing(source: str, place: int) -> int:
    """Return the place of the bracket that closes the one at `place`."""
    depth, closing = 0, _CLOSING[source[place]]
    for token in _TOKEN.finditer(source, place):
        if depth <= 1 and token[0] == closing:
            return token.start()
        depth += (token[0] == "{" or token.start() == place) - (token[0] == "}")
    raise ValueError("braces that do not match")


def _plain_text(source: str) -> str:
    """Return the text of a cell without fonts, colours, braces and dollar signs; maths keeps its braces."""
    parts: list[str] = []
    in_maths = False
    place = 0
    while token := _TOKEN.match(source, place):
        text, place = token[0], token.end()
        name = text[1:].rstrip("*")
        if text in ("$", "\\(", "\\)"):
            in_maths = not in_maths
        elif text in _SPACES:
            parts.append(" ")
        elif text[0] == "\\" and name in _LAYOUT:
            place = _read_arguments(source, place, _LAYOUT[name])[1]
        elif text[0] == "\\" and _FONT.fullmatch(name):
            bracket = _BRACKET.match(source, place)
            place = bracket.end() if bracket and name in ("makecell", "thead", "shortstack") else place
            parts.append("" if source.startswith("{", place) else " ")
        elif text[0] == "\\" and not name.isalpha():
            parts.append(text if in_maths and name in "{}" else name)
        elif text not in "{}" or in_maths:
            parts.append(text)
    return "".join(parts)
