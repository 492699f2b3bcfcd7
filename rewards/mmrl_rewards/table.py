"""A reward for tables, written in HTML or Markdown."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from lxml import etree, html
from numpy.typing import NDArray
from rapidfuzz.distance import Levenshtein
from rapidfuzz.process import cdist

from mmrl.types import AnswerType, Response, RewardValue, Sample, Unscorable
from mmrl_rewards import strings
from mmrl_rewards.contract import reward, target_value

CostMatrix = Sequence[Sequence[float]]

_MAX_NODES = 1000
_MARKDOWN_RULE = re.compile(r"\|?[ \t]*:?-+:?[ \t]*(?:\|[ \t]*:?-+:?[ \t]*)*\|?")  # under the head of a Markdown table
_PIPE = re.compile(r"(?<!\\)\|")
_FENCE = re.compile(r"```\w*[ \t]*\n(.*)\n[ \t]*```", re.DOTALL)
_CONTROL_CHARS = re.compile(r"[\x00-\x08\x0b\x0c\x0e-\x1f\ud800-\udfff]")


class TableCell(NamedTuple):
    """The text of a cell, and the number of columns and rows that it spans."""

    text: str
    colspan: int = 1
    rowspan: int = 1


class ParsedTable(NamedTuple):
    """Rows of cells as written: a cell that spans several rows is listed in the first alone."""

    rows: tuple[tuple[TableCell, ...], ...]

    @property
    def cells(self) -> list[TableCell]:
        """The cells in reading order."""
        return [cell for row in self.rows for cell in row]

    @property
    def num_nodes(self) -> int:
        """The number of rows and cells."""
        return len(self.rows) + len(self.cells)


@reward(name="teds", answer_types=(AnswerType.TEXT,))
def teds(response: Response, sample: Sample, *, structure_only: bool = False) -> RewardValue:
    """1 - edit distance of the two trees / the larger one's nodes; a table's nodes are its rows and cells.

    Deleting or inserting a node costs 1; replacing a cell costs 1 where the spans differ, and else the normalised
    Levenshtein distance of the texts (nothing with `structure_only`: TEDS-Struct). Source: TEDS of PubTabNet
    (arXiv:1911.10683, eq. 1). Departures: thead, tbody and markup inside of cells are no nodes, th is td, so that
    Markdown compares with HTML; an answer of more than twice the target's nodes earns 0.

    Raises:
        Unscorable: the target is not one table of 1 to 1000 nodes.
    """
    target = _target_table(sample)
    if response.answer.value is None:
        return RewardValue(0.0, response.answer.problems[0])
    source: str = response.answer.value
    if len(source) > 10 * len(sample.target.value) + 10_000:
        return RewardValue(0.0, f"{len(source)} characters for a table of {len(target.rows)} rows")
    try:
        answer = parse_table(source)
    except ValueError as error:
        return RewardValue(0.0, f"{error}: {strings.excerpt(source)}")
    sizes = f"{len(answer.rows)} rows, {len(answer.cells)} cells; expected {len(target.rows)}, {len(target.cells)}"
    if answer.num_nodes > 2 * target.num_nodes:
        return RewardValue(0.0, sizes)
    value = max(0.0, 1.0 - tree_edit_distance(answer, target, structure_only) / max(answer.num_nodes, target.num_nodes))
    return RewardValue(value, f"TEDS {value:.2f}: {sizes}")


def parse_table(source: str) -> ParsedTable:
    """The one table that stands in HTML or Markdown, in a fence or not; rows without cells are left out.

    Raises:
        ValueError: there is no table, more than one, or something beside it.
    """
    fenced = _FENCE.fullmatch(source.strip())
    source = (fenced[1] if fenced else source).strip()
    rows = _parse_html(source) if source.startswith("<") else _parse_markdown(source)
    table = ParsedTable(tuple(row for row in rows if row))
    if not table.rows:
        raise ValueError("an empty table")
    return table


def tree_edit_distance(a: ParsedTable, b: ParsedTable, structure_only: bool = False) -> float:
    """The least cost of edits that turn one table's tree into the other's: Zhang and Shasha 1989 for trees of depth 2.

    Nodes are taken in postorder, cells before their row, so a subtree is a run of nodes.
    """
    cells = _cell_replacement_costs(a.cells, b.cells, structure_only)
    own_a, own_b = _cells_per_node(a), _cells_per_node(b)
    # A cell stands for a row at the price of a replacement and of the row's cells.
    costs = 1.0 + np.abs(np.subtract.outer(own_a, own_b)).astype(np.float64)
    costs[np.ix_(own_a == 0, own_b == 0)] = cells
    costs[np.ix_(own_a > 0, own_b > 0)] = _row_distances(a, b, cells.tolist())
    return _forest_distance(costs.tolist(), own_a.tolist(), own_b.tolist())


def _forest_distance(costs: CostMatrix, own_a: Sequence[int], own_b: Sequence[int]) -> float:
    """Edit distance of two forests in postorder, given the costs of turning each subtree of one into each of the other.

    `own` is how many nodes of its subtree come before a node.
    """
    table: list[Sequence[float]] = [range(len(own_b) + 1)]
    before_b = [j - own for j, own in enumerate(own_b)]
    for i, (replacing, own) in enumerate(zip(costs, own_a, strict=True)):
        above, before_a, left = table[i], table[i - own], i + 1.0
        row = [left]
        for j, (before, cost) in enumerate(zip(before_b, replacing, strict=True)):
            left = min(left + 1.0, above[j + 1] + 1.0, before_a[before] + cost)
            row.append(left)
        table.append(row)
    return table[-1][-1]


def _row_distances(a: ParsedTable, b: ParsedTable, cell_distances: CostMatrix) -> list[list[float]]:
    """Distance of every row from every row, given that of every cell from every cell."""
    found: list[list[float]] = []
    start_a = 0
    for row_a in a.rows:
        rows, start_a = cell_distances[start_a : start_a + len(row_a)], start_a + len(row_a)
        found.append([])
        start_b = 0
        for row_b in b.rows:
            part = [row[start_b : start_b + len(row_b)] for row in rows]
            found[-1].append(_forest_distance(part, [0] * len(row_a), [0] * len(row_b)))
            start_b += len(row_b)
    return found


def _cells_per_node(table: ParsedTable) -> NDArray[np.intp]:
    """For each node in postorder, how many cells it has: 0 for a cell itself."""
    return np.array([count for row in table.rows for count in (*[0] * len(row), len(row))], dtype=np.intp)


def _cell_replacement_costs(
    a: Sequence[TableCell], b: Sequence[TableCell], structure_only: bool
) -> NDArray[np.float64]:
    """Cost of replacing each cell by each, (N, M)."""
    costs = np.zeros((len(a), len(b)))
    if not structure_only:
        texts = [cell.text for cell in a], [cell.text for cell in b]
        costs += cdist(*texts, scorer=Levenshtein.normalized_distance, dtype=np.float64)
    spans_a, spans_b = (np.array([cell[1:] for cell in cells]) for cells in (a, b))
    costs[(spans_a[:, None] != spans_b[None]).any(axis=-1)] = 1.0
    return costs


def _target_table(sample: Sample) -> ParsedTable:
    try:
        table = parse_table(target_value(sample, AnswerType.TEXT))
    except ValueError as error:
        raise Unscorable(f"the target {sample.target.value!r:.80} is {error}") from error
    if table.num_nodes > _MAX_NODES:
        raise Unscorable(
            f"the target is a table of {table.num_nodes} rows and cells, at most {_MAX_NODES} are compared"
        )
    return table


def _parse_html(source: str) -> list[tuple[TableCell, ...]]:
    try:
        parser = html.HTMLParser(encoding="utf-8", remove_comments=True, remove_pis=True)
        root = html.document_fromstring(_CONTROL_CHARS.sub("", source).encode(), parser=parser)
    except (etree.ParserError, etree.XMLSyntaxError):
        raise ValueError("not HTML") from None
    tables = list(root.iter("table"))
    if len(tables) != 1:
        raise ValueError(f"{len(tables)} tables")
    everything, inside = (" ".join(element.itertext()).split() for element in (root, tables[0]))
    if everything != inside:
        raise ValueError("text beside the table")
    return [tuple(_parse_html_cell(cell) for cell in row.iter("td", "th")) for row in tables[0].iter("tr")]


def _parse_html_cell(element: html.HtmlElement) -> TableCell:
    text = strings.normalize("".join(element.itertext()))
    return TableCell(text, *(_parse_span(element.get(name, "1")) for name in ("colspan", "rowspan")))


def _parse_span(text: str) -> int:
    """Return a colspan or rowspan. As in HTML, anything but a positive number counts as 1."""
    return max(1, int(text)) if text.isascii() and text.isdigit() and len(text) <= 4 else 1


def _parse_markdown(source: str) -> list[tuple[TableCell, ...]]:
    lines = [line.strip() for line in source.splitlines()]
    if len(lines) < 2 or not all("|" in line for line in lines) or not _MARKDOWN_RULE.fullmatch(lines[1]):
        raise ValueError("no table")
    return [_parse_markdown_row(line) for line in (lines[0], *lines[2:])]


def _parse_markdown_row(line: str) -> tuple[TableCell, ...]:
    parts = _PIPE.split(line)
    start, end = not parts[0].strip(), len(parts) - (not parts[-1].strip())
    return tuple(TableCell(strings.normalize(part.replace(r"\|", "|"))) for part in parts[start:end])
