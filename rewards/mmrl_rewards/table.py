"""A reward for tables, written in HTML, Markdown or LaTeX."""

from __future__ import annotations

import re
from collections.abc import Sequence
from itertools import accumulate, pairwise
from typing import NamedTuple

import numpy as np
from lxml import etree, html
from numpy.typing import NDArray
from rapidfuzz.distance import Levenshtein
from rapidfuzz.process import cdist

from mmrl.types import AnswerType, Response, RewardValue, Sample, Unscorable
from mmrl_rewards import strings
from mmrl_rewards.contract import answer_value, reward, target_value
from mmrl_rewards.latex_table import TableCell, parse_latex_table, parse_span

CostMatrix = Sequence[Sequence[float]]

_MAX_NODES = 1000
# The line under the head of a Markdown table.
_MARKDOWN_RULE = re.compile(r"\|?[ \t]*:?-+:?[ \t]*(?:\|[ \t]*:?-+:?[ \t]*)*\|?")
_BOLD = re.compile(r"\*\*([^*]+)\*\*")  # as HTML's <b> is, it is dropped
_PIPE = re.compile(r"(?<!\\)\|")
_FENCE = re.compile(r"```\w*[ \t]*\n(.*)\n[ \t]*```", re.DOTALL)
_CONTROL_CHARS = re.compile(r"[\x00-\x08\x0b\x0c\x0e-\x1f\ud800-\udfff]")


class ParsedTable(NamedTuple):
    """Holds a table as written."""

    rows: tuple[tuple[TableCell, ...], ...]  # a cell that spans several rows is only in the first

    @property
    def cells(self) -> list[TableCell]:
        """Return the cells in reading order."""
        return [cell for row in self.rows for cell in row]

    @property
    def num_nodes(self) -> int:
        """Return the number of rows and cells."""
        return len(self.rows) + len(self.cells)


@reward(name="teds", answer_types=(AnswerType.TEXT,))
def teds(response: Response, sample: Sample, *, structure_only: bool = False) -> RewardValue:
    """Return 1 - (edit distance of the two trees) / (nodes of the larger tree), in [0, 1]. Nodes are rows and cells.

    Deleting or inserting a node costs 1. Replacing a cell costs 1 if the spans differ, and else the normalised
    Levenshtein distance of the texts, or nothing with `structure_only`, which is TEDS-Struct.

    Source: TEDS of PubTabNet (arXiv:1911.10683, eq. 1); on LaTeX as in Table2LaTeX-RL (arXiv:2509.17589), which rewards
    TEDS-Struct above 0.9.
    Departures: thead, tbody and markup inside cells are not nodes, and th equals td, so that Markdown and LaTeX can be
    compared with HTML. An answer with more than twice the target's nodes earns 0.
    Unscorable: the target is not one table of 1 to 1000 nodes.
    """
    target = _target_table(sample)
    source: str = answer_value(response)
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
    """Return the table in an HTML, Markdown or LaTeX text, in a code fence or not. Rows without cells are left out.

    Raises:
        ValueError: there is no table, more than one, or text beside it.
    """
    fenced = _FENCE.fullmatch(source.strip())
    source = (fenced[1] if fenced else source).strip()
    if source.startswith("<"):
        rows = _parse_html(source)
    elif source.startswith(("\\", "%")):
        rows = parse_latex_table(source)
    else:
        rows = _parse_markdown(source)
    table = ParsedTable(tuple(row for row in rows if row))
    if not table.rows:
        raise ValueError("an empty table")
    return table


def tree_edit_distance(a: ParsedTable, b: ParsedTable, structure_only: bool = False) -> float:
    """Return the lowest cost of edits that turn one table's tree into the other's.

    Nodes are in postorder, cells before their row, so a subtree is a run of nodes.

    Source: Zhang and Shasha 1989. Departures: trees have depth 2, which needs no general recursion.
    """
    cells = _cell_replacement_costs(a.cells, b.cells, structure_only)
    sizes_a, sizes_b = _cells_per_node(a), _cells_per_node(b)
    # Turning a cell into a row costs 1 for the replacement and 1 for each of the row's cells.
    costs = 1.0 + np.abs(np.subtract.outer(sizes_a, sizes_b)).astype(np.float64)
    costs[np.ix_(sizes_a == 0, sizes_b == 0)] = cells
    costs[np.ix_(sizes_a > 0, sizes_b > 0)] = _row_distances(a, b, cells.tolist())
    return _forest_distance(costs.tolist(), sizes_a.tolist(), sizes_b.tolist())


def _forest_distance(costs: CostMatrix, sizes_a: Sequence[int], sizes_b: Sequence[int]) -> float:
    """Return the edit distance of two forests in postorder, given the `costs` of turning subtrees into each other.

    `sizes_a` and `sizes_b` are, for each node of a forest, the number of nodes below it.
    """
    # Row i, column j: the distance of the first i nodes of one forest and the first j of the other.
    table: list[Sequence[float]] = [range(len(sizes_b) + 1)]
    before_b = [j - size for j, size in enumerate(sizes_b)]
    for i, (replacing, size) in enumerate(zip(costs, sizes_a, strict=True)):
        above, before_a, left = table[i], table[i - size], i + 1.0
        row = [left]
        for j, (before, cost) in enumerate(zip(before_b, replacing, strict=True)):
            left = min(left + 1.0, above[j + 1] + 1.0, before_a[before] + cost)
            row.append(left)
        table.append(row)
    return table[-1][-1]


def _row_distances(a: ParsedTable, b: ParsedTable, cell_distances: CostMatrix) -> list[list[float]]:
    """Return the distance of every row of `a` from every row of `b`, given the distances of their cells."""
    found: list[list[float]] = []
    bounds_a, bounds_b = ([0, *accumulate(map(len, table.rows))] for table in (a, b))
    for first, last in pairwise(bounds_a):
        found.append([])
        for start, end in pairwise(bounds_b):
            part = [row[start:end] for row in cell_distances[first:last]]
            found[-1].append(_forest_distance(part, [0] * (last - first), [0] * (end - start)))
    return found


def _cells_per_node(table: ParsedTable) -> NDArray[np.intp]:
    """Return the number of cells of each node in postorder, [nodes]: 0 for a cell."""
    counts: list[int] = []
    for row in table.rows:
        counts += [*[0] * len(row), len(row)]
    return np.array(counts, dtype=np.intp)


def _cell_replacement_costs(
    a: Sequence[TableCell], b: Sequence[TableCell], structure_only: bool
) -> NDArray[np.float64]:
    """Return the cost of replacing each cell of `a` by each cell of `b`, [len(a), len(b)], in [0, 1]."""
    costs = np.zeros((len(a), len(b)))
    if not structure_only:
        texts_a, texts_b = [cell.text for cell in a], [cell.text for cell in b]
        costs += cdist(texts_a, texts_b, scorer=Levenshtein.normalized_distance, dtype=np.float64)
    spans_a = np.array([cell[1:] for cell in a])
    spans_b = np.array([cell[1:] for cell in b])
    # Colspan and rowspan together: cells of another size are other cells.
    costs[(spans_a[:, None] != spans_b[None]).any(axis=-1)] = 1.0
    return costs


def _target_table(sample: Sample) -> ParsedTable:
    """Return the target's table, of 1 to 1000 nodes."""
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
    """Return the rows of the one table in an HTML text."""
    try:
        parser = html.HTMLParser(encoding="utf-8", remove_comments=True, remove_pis=True)
        root = html.document_fromstring(_CONTROL_CHARS.sub("", source).encode(), parser=parser)
    except (etree.ParserError, etree.XMLSyntaxError):
        raise ValueError("not HTML") from None
    tables = list(root.iter("table"))
    if len(tables) != 1:
        raise ValueError(f"{len(tables)} tables")
    if " ".join(root.itertext()).split() != " ".join(tables[0].itertext()).split():
        raise ValueError("text beside the table")
    rows = []
    for row in tables[0].iter("tr"):
        cells = []
        for element in row.iter("td", "th"):
            text = strings.normalize("".join(element.itertext()))
            colspan, rowspan = (parse_span(element.get(name, "1"), 4) for name in ("colspan", "rowspan"))
            cells.append(TableCell(text, colspan, rowspan))
        rows.append(tuple(cells))
    return rows


def _parse_markdown(source: str) -> list[tuple[TableCell, ...]]:
    """Return the rows of a Markdown table."""
    lines = [line.strip() for line in source.splitlines()]
    if len(lines) < 2 or not all("|" in line for line in lines) or not _MARKDOWN_RULE.fullmatch(lines[1]):
        raise ValueError("no table")
    rows = []
    for line in (lines[0], *lines[2:]):
        parts = _PIPE.split(line)
        # Pipes at the start and end of a line are optional.
        start, end = not parts[0].strip(), len(parts) - (not parts[-1].strip())
        texts = [_BOLD.sub(r"\1", part.replace(r"\|", "|")) for part in parts[start:end]]
        rows.append(tuple(TableCell(strings.normalize(text)) for text in texts))
    return rows
