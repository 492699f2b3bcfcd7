"""Tables in LaTeX: random ones written in the ways that people do, and sources made to break a reader."""

import random

import pytest
from waiting import bounded

from mmrl_rewards import table

FONTS = ["{}", r"\textbf{{{}}}", r"{{\bf {}}}", "${}$", r"\cellcolor[gray]{{0.9}}{}"]


def latex_of(rows, rng):
    """Write rows of (text, colspan, rowspan) as LaTeX, in one of the ways that people do, with rules and fonts."""
    lines, covered = [], {}
    for row in rows:
        written, column, cells = [], 0, list(row)
        while cells or covered.get(column, 0):
            if covered.get(column, 0):
                covered[column] -= 1
                column += 1
                written.append("")
                continue
            text, colspan, rowspan = cells.pop(0)
            source = rng.choice(["{}", r"\textbf{{{}}}", r"{{\bf {}}}", "${}$", r"\cellcolor[gray]{{0.9}}{}"]).format(
                text
            )
            if rowspan > 1:
                source = rf"\multirow{{{rowspan}}}{{*}}{{{source}}}"
            if colspan > 1:
                source = rf"\multicolumn{{{colspan}}}{{c|}}{{{source}}}"
            for index in range(column, column + colspan):
                covered[index] = rowspan - 1
            column += colspan
            written.append(source)
        rule = rng.choice(["", r"\hline ", r"\midrule[1pt] ", r"\cmidrule(lr){1-2}\cline{3-3}"])
        lines.append(rule + rng.choice([" & ", "&", "\n & "]).join(written))
    ends = rng.choice([" \\\\\n", r"\\[2pt]", r"\tabularnewline "])
    return r"\begin{tabular}{@{}l|*{2}{c}@{}}" + ends.join(lines) + r"\\ \bottomrule \end{tabular}"


def test_a_table_written_in_latex_has_its_cells():
    rng = random.Random(7)
    for _ in range(200):
        height, width = rng.randint(1, 4), rng.randint(2, 4)
        taken, rows = set(), []
        for y in range(height):
            row, x = [], 0
            while x < width:
                if (y, x) in taken:
                    x += 1
                    continue
                colspan = rng.randint(1, 2) if x + 1 < width and (y, x + 1) not in taken else 1
                rowspan = rng.randint(1, min(2, height - y)) if x else 1
                taken |= {(y + j, x + i) for j in range(rowspan) for i in range(colspan)}
                row.append(("".join(rng.choices("abc1", k=rng.randint(1, 3))), colspan, rowspan))
                x += colspan
            rows.append(tuple(row))
        source = latex_of(rows, rng)
        assert table.parse_table(source).rows == tuple(rows), source


@pytest.mark.parametrize(
    "inside",
    [
        *("", "&", r"\\", "{", "}", r"\color", r"\color{", r"\multirow", r"\multirow{2}"),
        *(r"\multicolumn{x}{c}{a}", "$"),
        *(r"\begin{tabular}{c}", r"\end{array}", r"\textbf{" * 5000 + "}" * 5000, r"\multirow{" * 3000, r"\[" * 5000),
        *(r"\color{" * 5000, "{" * 5000 + "}" * 5000, "&" * 20_000, r"\multirow{99}*{a}&" * 3000),
    ],
)
def test_reading_a_latex_table_gives_a_table_or_a_short_error(inside):
    with bounded():
        for source in (
            rf"\begin{{tabular}}{{l}}{inside}\end{{tabular}}",
            rf"{inside}\begin{{tabular}}{{l}}a\end{{tabular}}",
        ):
            try:
                assert table.parse_table(f"%\n{source}").num_nodes >= 2
            except ValueError as error:
                assert 0 < len(str(error)) < 80
