"""Move modules and symbols by a table, and rewrite every import, dotted string and file path that names them.

    python tools/dev/move_modules.py TABLE.json

TABLE.json has two keys. `move` maps a file to its new path. `split` maps a file (as it is called after `move`) to
`{new file: [names of top-level definitions]}`; the definitions are cut from the first file and appended to the second
with a copy of its imports. Run `ruff check --fix` and `ruff format` afterwards: they drop the imports that are unused.
"""

from __future__ import annotations

import ast
import json
import re
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

ROOT = Path(__file__).parents[2]
SOURCE_ROOTS = ("rewards/", "datasets/")
TEXT_SUFFIXES = {".py", ".md", ".toml", ".yaml", ".json", ".txt", ".ipynb", ""}


def module_name(path: str) -> str:
    """Return the dotted name under which the file at `path` is imported."""
    for source_root in SOURCE_ROOTS:
        path = path.removeprefix(source_root)
    return path.removesuffix(".py").removesuffix("/__init__").replace("/", ".")


def move_files(moves: Mapping[str, str]) -> None:
    """Move files with git, and create the packages that are missing."""
    for old, new in moves.items():
        target = ROOT / new
        target.parent.mkdir(parents=True, exist_ok=True)
        subprocess.run(["git", "mv", old, new], cwd=ROOT, check=True)
    for new in moves.values():
        for folder in Path(new).parents:
            marker = ROOT / folder / "__init__.py"
            is_package = str(folder) not in (".", "rewards", "datasets", "tools", "tests")
            if is_package and not marker.exists():
                marker.write_text('"""TODO."""\n')
                subprocess.run(["git", "add", str(marker)], cwd=ROOT, check=True)


class ImportRewriter:
    """Rewrites the imports of one file after modules and symbols have moved."""

    def __init__(
        self,
        modules: Mapping[str, str],
        symbols: Mapping[tuple[str, str], str],
        reexported: frozenset[str] = frozenset(),
    ) -> None:
        self.modules, self.symbols, self.reexported = modules, symbols, reexported

    def rewrite(self, source: str) -> str:
        """Return `source` with new imports. A module that is called otherwise now is renamed where it is used."""
        lines = source.splitlines(keepends=True)
        renamed: dict[str, str] = {}
        edits: list[tuple[int, int, str]] = []
        for node in ast.walk(ast.parse(source)):
            if isinstance(node, ast.ImportFrom) and node.module and not node.level:
                new = self._from_import(node, renamed)
            elif isinstance(node, ast.Import):
                new = self._import(node)
            else:
                continue
            if new is not None:
                indent = " " * node.col_offset
                text = "".join(f"{indent}{line}\n" for line in new)
                # The mark keeps the pass over plain text from moving a name twice; it is taken out afterwards.
                edits.append((node.lineno, node.end_lineno or node.lineno, text.replace("mmrl", "mm\0rl")))
        for first, last, text in sorted(edits, reverse=True):
            lines[first - 1 : last] = [text]
        source = "".join(lines)
        for old, new_name in renamed.items():
            source = re.sub(rf"(?<![\w.\"'/]){old}(?=\.\w)(?!\.(py|md|yaml|jsonl?)\b)", new_name, source)
        return source

    def _from_import(self, node: ast.ImportFrom, renamed: dict[str, str]) -> list[str] | None:
        groups: dict[str, list[str]] = {}
        changed = False
        for alias in node.names:
            module, name, asname = node.module or "", alias.name, alias.asname
            dotted = f"{module}.{name}"
            if dotted in self.modules and dotted not in self.reexported:
                parent, _, leaf = self.modules[dotted].rpartition(".")
                if leaf != name and asname is None:
                    renamed[name] = leaf
                module, name = parent, leaf
            else:
                module = self.symbols.get((module, name)) or self.modules.get(module, module)
            changed |= (module, name) != (node.module, alias.name)
            groups.setdefault(module, []).append(f"{name} as {asname}" if asname else name)
        if not changed:
            return None
        return [f"from {module} import {', '.join(names)}" for module, names in groups.items()]

    def _import(self, node: ast.Import) -> list[str] | None:
        names = [(self.modules.get(alias.name, alias.name), alias) for alias in node.names]
        if all(new == alias.name for new, alias in names):
            return None
        return [f"import {new}" + (f" as {alias.asname}" if alias.asname else "") for new, alias in names]


def rewrite_text(text: str, modules: Mapping[str, str], moves: Mapping[str, str]) -> str:
    """Rewrite dotted names and file paths wherever they stand: strings, docs, YAML."""

    def dotted(match: re.Match[str]) -> str:
        name = match.group(0)
        prefix = name
        while prefix:
            if prefix in modules:
                return modules[prefix] + name[len(prefix) :]
            prefix = prefix.rpartition(".")[0]
        return name

    text = re.sub(r"(?<![\w/.])mmrl(?:_rewards|_datasets)?(?:\.[A-Za-z_]\w*)+", dotted, text)
    for old, new in moves.items():
        text = re.sub(rf"(?<![\w/]){re.escape(old)}(?!\w)", new, text)
    return text


def split_file(path: str, parts: Mapping[str, list[str]]) -> dict[tuple[str, str], str]:
    """Cut definitions out of a file into others; return where each symbol has gone."""
    source = (ROOT / path).read_text(encoding="utf-8")
    lines = source.splitlines(keepends=True)
    tree = ast.parse(source)
    imports = [
        ast.get_source_segment(source, node) for node in tree.body if isinstance(node, ast.Import | ast.ImportFrom)
    ]
    guarded = [
        ast.get_source_segment(source, node)
        for node in tree.body
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test)
    ]
    gone: dict[tuple[str, str], str] = {}
    cut: set[int] = set()
    for target, names in parts.items():
        pieces = []
        for index, node in enumerate(tree.body):
            found = defined_name(node)
            if found not in names:
                continue
            first = min([node.lineno, *(d.lineno for d in getattr(node, "decorator_list", []))])
            last = node.end_lineno or node.lineno
            while first > 1 and lines[first - 2].startswith("#"):
                first -= 1
            following = tree.body[index + 1] if index + 1 < len(tree.body) else None
            if isinstance(following, ast.Expr) and isinstance(following.value, ast.Constant):
                last = following.end_lineno or last  # the docstring of a constant
            pieces.append("".join(lines[first - 1 : last]))
            cut.update(range(first - 1, last))
            gone[(module_name(path), found)] = module_name(target)
        missing = set(names) - {name for (_, name) in gone}
        if missing:
            raise SystemExit(f"{path} does not define {sorted(missing)}")
        where = ROOT / target
        body = "\n\n\n".join(piece.rstrip("\n") for piece in pieces) + "\n"
        if where.exists():
            head = where.read_text(encoding="utf-8")
            doc_end = ast.parse(head).body[0].end_lineno or 0
            head_lines = head.splitlines(keepends=True)
            after_future = doc_end
            if "from __future__ import annotations\n" in head_lines:
                after_future = head_lines.index("from __future__ import annotations\n") + 1
            extra = [line for line in imports if line and "__future__" not in line]
            head = (
                "".join(head_lines[:after_future]) + "\n" + "\n".join(extra) + "\n" + "".join(head_lines[after_future:])
            )
            where.write_text(head.rstrip("\n") + "\n\n\n" + body, encoding="utf-8")
        else:
            top = [line for line in (*imports, *guarded) if line]
            where.write_text('"""TODO."""\n\n' + "\n".join(top) + "\n\n\n" + body, encoding="utf-8")
        subprocess.run(["git", "add", "-N", target], cwd=ROOT, check=True)
    # What stays may use what has gone.
    back = "".join(f"from {module} import {name}\n" for (_, name), module in gone.items())
    rest = [line for number, line in enumerate(lines) if number not in cut]
    future = next((i for i, line in enumerate(rest) if line.startswith(("from __future__", "import ", "from "))), 0)
    rest.insert(future + 1, back)
    (ROOT / path).write_text("".join(rest), encoding="utf-8")
    return gone


def defined_name(node: ast.stmt) -> str:
    """Return the name that a top-level statement defines, or an empty string."""
    match node:
        case ast.FunctionDef(name=name) | ast.AsyncFunctionDef(name=name) | ast.ClassDef(name=name):
            return name
        case ast.Assign(targets=[ast.Name(id=name)]) | ast.AnnAssign(target=ast.Name(id=name)):
            return name
    return ""


def main(table_path: str) -> None:
    """Apply a table to the repository."""
    table = json.loads(Path(table_path).read_text())
    moves: dict[str, str] = table.get("move", {})
    move_files(moves)
    modules = {module_name(old): module_name(new) for old, new in moves.items()}
    symbols: dict[tuple[str, str], str] = {}
    rewrite_all(ImportRewriter(modules, {}, frozenset(table.get("reexported", ()))), modules, moves)
    for path, parts in table.get("split", {}).items():
        gone = split_file(path, parts)
        if not path.endswith("__init__.py"):  # a package goes on offering what its modules define
            symbols |= gone
    if symbols:
        rewrite_all(ImportRewriter({}, symbols), {f"{m}.{n}": f"{new}.{n}" for (m, n), new in symbols.items()}, {})


def rewrite_all(rewriter: ImportRewriter, modules: Mapping[str, str], moves: Mapping[str, str]) -> None:
    """Rewrite every tracked text file."""
    listed = subprocess.run(
        ["git", "ls-files"], cwd=ROOT, check=True, capture_output=True, text=True
    ).stdout.splitlines()
    for name in listed:
        path = ROOT / name
        if (
            path.suffix not in TEXT_SUFFIXES
            or name.startswith("tools/dev/")
            or name == "CHANGELOG.md"
            or not path.exists()
        ):
            continue
        before = path.read_text(encoding="utf-8")
        after = rewriter.rewrite(before) if path.suffix == ".py" else before
        after = rewrite_text(after, modules, moves).replace("\0", "")
        if after != before:
            path.write_text(after, encoding="utf-8")


if __name__ == "__main__":
    main(sys.argv[1])
