"""What plays a role in a layout: a column, several, or a text made of columns by a template."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final, Protocol

from jinja2 import StrictUndefined, Template, TemplateRuntimeError, TemplateSyntaxError, meta
from jinja2.sandbox import SandboxedEnvironment

from mmrl.types import UserError
from mmrl_datasets.formats.row import BadRowError, Cells, did_you_mean, get_cell, has_column, short_repr

TEMPLATE_MARKERS: Final = ("{{", "{%")  # a name with one of these is a template


class Column(Protocol):
    """Where a value comes from."""

    @property
    def required_columns(self) -> frozenset[str]:
        """The columns that a row must have."""

    @property
    def consumed_columns(self) -> frozenset[str]:
        """The columns whose whole content is in the value, so that `meta` need not repeat them."""

    def read(self, cells: Cells) -> object:
        """The value in a row.

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
        """The column."""
        return frozenset({self.name})

    @property
    def consumed_columns(self) -> frozenset[str]:
        """The column."""
        return frozenset({self.name})

    def read(self, cells: Cells) -> object:
        """What the cell holds."""
        return get_cell(cells, self.name)


@dataclass(frozen=True, slots=True)
class ColumnList:
    """Columns with one entry or none each, as a list."""

    names: tuple[str, ...]

    @property
    def required_columns(self) -> frozenset[str]:
        """All of them."""
        return frozenset(self.names)

    @property
    def consumed_columns(self) -> frozenset[str]:
        """All of them."""
        return frozenset(self.names)

    def read(self, cells: Cells) -> object:
        """The entries that are not null."""
        return [entry for entry in (get_cell(cells, name) for name in self.names) if entry is not None]


@dataclass(frozen=True, slots=True)
class ColumnTemplate:
    """A Jinja template, run in a sandbox. It puts text and numbers in; what a row lacks is an error, never blank."""

    source_text: str
    template: Template
    required_columns: frozenset[str]
    consumed_columns: frozenset[str] = frozenset()

    def read(self, cells: Cells) -> str | None:
        """The text; None when the template leaves it empty."""
        given = {name: get_cell(cells, name) for name in self.required_columns}
        try:
            return self.template.render(given) or None
        except (TemplateRuntimeError, BadRowError, TypeError, ValueError, ArithmeticError, LookupError) as error:
            raise BadRowError(f"template {short_repr(self.source_text)}: {error}") from error


def parse_template(written: str, option: str) -> ColumnTemplate:
    """A template with the columns it needs.

    Raises:
        UserError: it is no Jinja template.
    """
    environment = SandboxedEnvironment(undefined=StrictUndefined, finalize=_check_printable, keep_trailing_newline=True)
    try:
        needs = meta.find_undeclared_variables(environment.parse(written))
        return ColumnTemplate(written, environment.from_string(written), frozenset(needs) - environment.globals.keys())
    except TemplateSyntaxError as error:
        raise UserError(f"{option}: {short_repr(written)} is no template: {error}; write {{{{ column }}}}") from error


def parse_column(written: str | Sequence[str], option: str) -> Column:
    """The column, columns or template that an option names.

    Raises:
        UserError: it is a broken template.
    """
    if not isinstance(written, str):
        return ColumnList(tuple(written))
    return (
        parse_template(written, option)
        if any(brace in written for brace in TEMPLATE_MARKERS)
        else SingleColumn(written)
    )


def parse_columns(
    columns: Mapping[str, str | Sequence[str]], roles: Collection[str], required: Iterable[str]
) -> dict[str, Column]:
    """What plays each role.

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
    """All columns that a row must have."""
    return frozenset().union(*(column.required_columns for column in columns))


def optional_value(cells: Cells, column: Column | None) -> object:
    """The value, or None when nothing plays the role or this row lacks a column for it."""
    if column is None or not all(has_column(cells, name) for name in column.required_columns):
        return None
    return column.read(cells)


def _check_printable(value: object) -> object:
    """What may be put into text.

    Raises:
        BadRowError: it is neither text nor a number.
    """
    if isinstance(value, StrictUndefined) or (isinstance(value, str | int | float) and not isinstance(value, bool)):
        return value
    raise BadRowError(f"only text and numbers can be put into a template, not {short_repr(value)}")
