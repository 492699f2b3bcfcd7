"""Columns of a table: the value of a sample's field comes from one, from several, or from a template over them."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from operator import attrgetter
from typing import Final

from jinja2 import StrictUndefined, TemplateRuntimeError, TemplateSyntaxError, meta, nodes
from jinja2.sandbox import SandboxedEnvironment

from mmrl.types import UserError
from mmrl_datasets.formats.row import BadRowError, Cells, did_you_mean, get_cell, has_column, short_repr

TEMPLATE_MARKERS: Final = ("{{", "{%")  # an option that contains one of these is a template, not a column name


@dataclass(frozen=True, slots=True)
class Column:
    """A source of one value in each row: a column, a list of columns, or a Jinja template over columns."""

    # Returns the value in a row; raises MissingColumnError, or BadRowError for a template that cannot be filled.
    read: Callable[[Cells], object]
    required_columns: frozenset[str]  # columns that a row must have
    # Columns whose whole content is in the value, so that `meta` need not repeat them.
    consumed_columns: frozenset[str] = frozenset()


def single_column(name: str) -> Column:
    """Return the column of that name; `a.b` is the key `b` within column `a`."""
    return Column(partial(get_cell, column=name), frozenset({name}), frozenset({name}))


def is_template(written: str | Sequence[str] | None) -> bool:
    """Return True if an option holds a template, not a word or the name of a column."""
    return isinstance(written, str) and any(marker in written for marker in TEMPLATE_MARKERS)


def parse_template(text: str, option: str) -> Column:
    """Return the Jinja template that an option holds; raises UserError if it is none."""
    environment = SandboxedEnvironment(undefined=StrictUndefined, finalize=_check_printable, keep_trailing_newline=True)
    try:
        tree = environment.parse(text)
        template = environment.from_string(text)
    except TemplateSyntaxError as error:
        raise UserError(f"{option}: {short_repr(text)} is not a template: {error}; write {{{{ column }}}}") from error
    # Jinja's own functions, such as `range`, are not columns.
    names = meta.find_undeclared_variables(tree) - environment.globals.keys()
    required = frozenset(names.intersection(_plain_names(tree)))

    def fill(cells: Cells) -> str | None:
        values = {name: get_cell(cells, name) for name in required}
        # A table with fixed columns writes null where others lack the column; to a template, both are undefined.
        values |= {name: cells[name] for name in names - required if cells.get(name) is not None}
        try:
            return template.render(values) or None
        except (TemplateRuntimeError, BadRowError, TypeError, ValueError, ArithmeticError, LookupError) as error:
            raise BadRowError(f"template {short_repr(text)}: {error}") from error

    # A template may leave out a part of a column, so it consumes none, and `meta` keeps all of them.
    return Column(fill, required)


def parse_column(written: str | Sequence[str], option: str) -> Column:
    """Return the column, the list of columns or the template that an option holds; raises as `parse_template`."""
    if is_template(written):
        return parse_template(str(written), option)
    if isinstance(written, str):
        return single_column(written)
    names = frozenset(written)
    return Column(partial(_read_list, columns=tuple(written)), names, names)


def parse_columns(
    columns: Mapping[str, str | Sequence[str]], roles: Collection[str], required: Iterable[str]
) -> dict[str, Column]:
    """Return the column of each role that the option `columns` names.

    Raises:
        UserError: a role that does not exist or is missing, or a broken template.
    """
    for role in columns:
        if role not in roles:
            raise UserError(f"columns: unknown role {role!r}{did_you_mean(role, roles)}; there are {', '.join(roles)}")
    missing = [role for role in required if role not in columns]
    if missing:
        raise UserError(f"columns: say which column is the {' and which the '.join(missing)}")
    return {role: parse_column(name, f"columns.{role}") for role, name in columns.items()}


def collect_required_columns(columns: Iterable[Column]) -> frozenset[str]:
    """Return all columns that a row must have for these values."""
    return frozenset().union(*map(attrgetter("required_columns"), columns))


def optional_value(cells: Cells, column: Column | None) -> object:
    """Return the value of a column, or None if `column` is None or the row lacks it."""
    if column is None or not all(has_column(cells, name) for name in column.required_columns):
        return None
    return column.read(cells)


def _read_list(cells: Cells, columns: Sequence[str]) -> object:
    entries = [get_cell(cells, column) for column in columns]
    return [entry for entry in entries if entry is not None]


def _plain_names(node: nodes.Node, asked: frozenset[str] = frozenset()) -> Iterator[str]:
    """Yield the names that a template uses without guarding them by `default` or `is defined`."""
    if isinstance(node, nodes.If | nodes.CondExpr):
        # A name that an `if` tests is guarded in all its branches. A branch that uses a missing one fails on the row.
        asked |= frozenset(map(_asked_name, node.find_all(nodes.Test)))
    if isinstance(node, nodes.Name) and node.name not in asked:
        yield node.name
    for child in node.iter_child_nodes(exclude=("node",) if _asked_name(node) else ()):
        yield from _plain_names(child, asked)


def _asked_name(node: nodes.Node) -> str:
    """Return the name that a filter or test guards, empty for any other node."""
    match node:
        case nodes.Filter() | nodes.Test() if node.name in ("default", "d", "defined", "undefined"):
            return node.node.name if isinstance(node.node, nodes.Name) else ""
    return ""


def _check_printable(value: object) -> object:
    # Jinja calls this for each value. Without it, a null would become the word "None" in the text.
    # An undefined value passes, because Jinja then raises its own error, which names it.
    if isinstance(value, StrictUndefined) or (isinstance(value, str | int | float) and not isinstance(value, bool)):
        return value
    raise BadRowError(f"only text and numbers can be put into a template, not {short_repr(value)}")
