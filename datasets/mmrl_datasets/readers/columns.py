"""Columns of a table: the value of a sample's field comes from one, from several, or from a template over them."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final, Protocol

from jinja2 import StrictUndefined, Template, TemplateRuntimeError, TemplateSyntaxError, meta
from jinja2.sandbox import SandboxedEnvironment

from mmrl.types import UserError
from mmrl_datasets.formats.row import BadRowError, Cells, did_you_mean, get_cell, has_column, short_repr

TEMPLATE_MARKERS: Final = ("{{", "{%")
"""An option that contains one of these is a template, not a column name."""


class Column(Protocol):
    """A source of one value in each row."""

    @property
    def required_columns(self) -> frozenset[str]:
        """Columns that a row must have."""

    @property
    def consumed_columns(self) -> frozenset[str]:
        """Columns whose whole content is in the value, so that `meta` need not repeat them."""

    def read(self, cells: Cells) -> object:
        """Return the value in a row.

        Raises:
            MissingColumnError: the row lacks a column.
            BadRowError: the template cannot be filled.
        """


@dataclass(frozen=True, slots=True)
class SingleColumn:
    """One column; `a.b` is the key `b` within column `a`."""

    name: str

    @property
    def required_columns(self) -> frozenset[str]:
        """Set of the one column."""
        return frozenset({self.name})

    @property
    def consumed_columns(self) -> frozenset[str]:
        """Set of the one column."""
        return frozenset({self.name})

    def read(self, cells: Cells) -> object:
        """Return the value of the cell.

        Raises:
            MissingColumnError: the row lacks the column.
        """
        return get_cell(cells, self.name)


@dataclass(frozen=True, slots=True)
class ColumnList:
    """Columns that hold one entry each of a list."""

    names: tuple[str, ...]

    @property
    def required_columns(self) -> frozenset[str]:
        """Set of all the columns."""
        return frozenset(self.names)

    @property
    def consumed_columns(self) -> frozenset[str]:
        """Set of all the columns."""
        return frozenset(self.names)

    def read(self, cells: Cells) -> object:
        """Return the list of the entries that are not null."""
        entries = [get_cell(cells, name) for name in self.names]
        return [entry for entry in entries if entry is not None]


@dataclass(frozen=True, slots=True)
class ColumnTemplate:
    """A Jinja template over columns, run in a sandbox. Missing columns are errors, and only text and numbers fit in."""

    source_text: str
    """The template as the option wrote it, for error messages."""
    template: Template
    required_columns: frozenset[str]
    """The columns that the template names."""
    consumed_columns: frozenset[str] = frozenset()
    """Always empty: a template may leave out a part of a column, so `meta` keeps all of them."""

    def read(self, cells: Cells) -> str | None:
        """Return the filled template, or None if it is empty.

        Raises:
            MissingColumnError: the row lacks a column.
            BadRowError: the template cannot be filled.
        """
        values = {}
        for name in self.required_columns:
            values[name] = get_cell(cells, name)
        try:
            return self.template.render(values) or None
        except (TemplateRuntimeError, BadRowError, TypeError, ValueError, ArithmeticError, LookupError) as error:
            raise BadRowError(f"template {short_repr(self.source_text)}: {error}") from error


def parse_template(text: str, option: str) -> ColumnTemplate:
    """Return the template that an option holds.

    Raises:
        UserError: it is no Jinja template.
    """
    environment = SandboxedEnvironment(undefined=StrictUndefined, finalize=_check_printable, keep_trailing_newline=True)
    try:
        names = frozenset(meta.find_undeclared_variables(environment.parse(text)))
        # Jinja's own functions, such as `range`, are no columns.
        return ColumnTemplate(text, environment.from_string(text), names - environment.globals.keys())
    except TemplateSyntaxError as error:
        raise UserError(f"{option}: {short_repr(text)} is no template: {error}; write {{{{ column }}}}") from error


def parse_column(written: str | Sequence[str], option: str) -> Column:
    """Return the column, the list of columns or the template that an option holds.

    Raises:
        UserError: it is a broken template.
    """
    if not isinstance(written, str):
        return ColumnList(tuple(written))
    if any(marker in written for marker in TEMPLATE_MARKERS):
        return parse_template(written, option)
    return SingleColumn(written)


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
    return frozenset().union(*(column.required_columns for column in columns))


def optional_value(cells: Cells, column: Column | None) -> object:
    """Return the value of a column, or None if `column` is None or the row lacks it."""
    if column is None or not all(has_column(cells, name) for name in column.required_columns):
        return None
    return column.read(cells)


def _check_printable(value: object) -> object:
    """Return a value that may be put into text. Jinja calls this for each value.

    Raises:
        BadRowError: it is neither text nor a number. A null would become the word "None".
    """
    # An undefined value passes, because Jinja then raises its own error, which names it.
    if isinstance(value, StrictUndefined) or (isinstance(value, str | int | float) and not isinstance(value, bool)):
        return value
    raise BadRowError(f"only text and numbers can be put into a template, not {short_repr(value)}")
