"""What plays a role in a layout: a column, several, or a text made of columns by a template."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final, Protocol

from jinja2 import StrictUndefined, Template, TemplateRuntimeError, TemplateSyntaxError, meta
from jinja2.sandbox import SandboxedEnvironment

from mmrl.types import UserError
from mmrl_datasets.formats.row import BadRowError, Cells, cell, did_you_mean, has, shown

BRACES: Final = ("{{", "{%")  # a name with one of these is a template


class Column(Protocol):
    """Where a value comes from."""

    @property
    def needs(self) -> frozenset[str]:
        """The columns that a row must have."""

    @property
    def uses_up(self) -> frozenset[str]:
        """The columns whose whole content is in the value, so that `meta` need not repeat them."""

    def of(self, cells: Cells) -> object:
        """The value in a row.

        Raises:
            MissingColumnError: the row lacks a column.
            BadRowError: the template cannot be filled.
        """


@dataclass(frozen=True, slots=True)
class Named:
    """One column; `a.b` is the key `b` within column `a`."""

    name: str

    @property
    def needs(self) -> frozenset[str]:
        """The column."""
        return frozenset({self.name})

    @property
    def uses_up(self) -> frozenset[str]:
        """The column."""
        return frozenset({self.name})

    def of(self, cells: Cells) -> object:
        """What the cell holds."""
        return cell(cells, self.name)


@dataclass(frozen=True, slots=True)
class Several:
    """Columns with one entry or none each, as a list."""

    names: tuple[str, ...]

    @property
    def needs(self) -> frozenset[str]:
        """All of them."""
        return frozenset(self.names)

    @property
    def uses_up(self) -> frozenset[str]:
        """All of them."""
        return frozenset(self.names)

    def of(self, cells: Cells) -> object:
        """The entries that are not null."""
        return [entry for entry in (cell(cells, name) for name in self.names) if entry is not None]


@dataclass(frozen=True, slots=True)
class Filled:
    """A Jinja template, run in a sandbox. It puts text and numbers in; what a row lacks is an error, never blank."""

    written: str
    template: Template
    needs: frozenset[str]
    uses_up: frozenset[str] = frozenset()

    def of(self, cells: Cells) -> str | None:
        """The text; None when the template leaves it empty."""
        given = {name: cell(cells, name) for name in self.needs}
        try:
            return self.template.render(given) or None
        except (TemplateRuntimeError, BadRowError, TypeError, ValueError, ArithmeticError, LookupError) as error:
            raise BadRowError(f"template {shown(self.written)}: {error}") from error


def template(written: str, option: str) -> Filled:
    """A template with the columns it needs.

    Raises:
        UserError: it is no Jinja template.
    """
    environment = SandboxedEnvironment(undefined=StrictUndefined, finalize=_printable, keep_trailing_newline=True)
    try:
        needs = meta.find_undeclared_variables(environment.parse(written))
        return Filled(written, environment.from_string(written), frozenset(needs) - environment.globals.keys())
    except TemplateSyntaxError as error:
        raise UserError(f"{option}: {shown(written)} is no template: {error}; write {{{{ column }}}}") from error


def column(written: str | Sequence[str], option: str) -> Column:
    """The column, columns or template that an option names.

    Raises:
        UserError: it is a broken template.
    """
    if not isinstance(written, str):
        return Several(tuple(written))
    return template(written, option) if any(brace in written for brace in BRACES) else Named(written)


def columns_of(
    written: Mapping[str, str | Sequence[str]], roles: Collection[str], required: Iterable[str]
) -> dict[str, Column]:
    """What plays each role.

    Raises:
        UserError: a role that does not exist or is missing, or a broken template.
    """
    for role in written:
        if role not in roles:
            raise UserError(f"columns: unknown role {role!r}{did_you_mean(role, roles)}; there are {', '.join(roles)}")
    missing = [role for role in required if role not in written]
    if missing:
        raise UserError(f"columns: say which column is the {' and which the '.join(missing)}")
    return {role: column(name, f"columns.{role}") for role, name in written.items()}


def needed(columns: Iterable[Column]) -> frozenset[str]:
    """All columns that a row must have."""
    return frozenset().union(*(column.needs for column in columns))


def optional(cells: Cells, column: Column | None) -> object:
    """The value, or None when nothing plays the role or this row lacks a column for it."""
    if column is None or not all(has(cells, name) for name in column.needs):
        return None
    return column.of(cells)


def _printable(value: object) -> object:
    """What may be put into text.

    Raises:
        BadRowError: it is neither text nor a number.
    """
    if isinstance(value, StrictUndefined) or (isinstance(value, str | int | float) and not isinstance(value, bool)):
        return value
    raise BadRowError(f"only text and numbers can be put into a template, not {shown(value)}")
