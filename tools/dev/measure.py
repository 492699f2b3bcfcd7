"""Print the numbers that CONTRIBUTING.md holds the code to, measured on this checkout.

    python tools/dev/measure.py            # a table
    python tools/dev/measure.py --json     # the same as JSON

Product code is `mmrl`, `mmrl_rewards` and `mmrl_datasets`. `tests/test_house.py` holds those numbers that have a limit.
The size of a training step is measured by `tools/dev/trace_step.py`, which has to run one.
"""

from __future__ import annotations

import argparse
import ast
import json
import re
import statistics
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

ROOT = Path(__file__).parents[2]
PRODUCT_FOLDERS = ("mmrl", "rewards/mmrl_rewards", "datasets/mmrl_datasets")
TENSOR_FOLDERS = ("mmrl/policy/", "mmrl/learner/", "mmrl/algo/")
RIDDLE_WORDS = ("What", "Who", "Whether", "How", "Where", "As the", "The same")
COMPREHENSIONS = (ast.ListComp, ast.SetComp, ast.DictComp, ast.GeneratorExp)
FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef)
DOCUMENTED = (*FUNCTIONS, ast.ClassDef, ast.Module)


@dataclass(slots=True)
class Measures:
    """Counts over all files of the product."""

    lines: int = 0
    files: int = 0
    longest_file: int = 0
    comprehensions: int = 0
    nested_comprehensions: list[str] = field(default_factory=list)
    walruses: int = 0
    comments: int = 0
    function_lines: list[int] = field(default_factory=list)
    riddles: list[str] = field(default_factory=list)
    tensor_functions: int = 0
    shapeless_tensor_functions: list[str] = field(default_factory=list)
    class_files: dict[str, list[str]] = field(default_factory=dict)

    @property
    def shared_class_names(self) -> list[str]:
        """Public classes of one name in two files or more."""
        return sorted(f"{name}: {', '.join(files)}" for name, files in self.class_files.items() if len(files) > 1)

    def summary(self) -> dict[str, float | int | list[str]]:
        """Return the numbers, with ratios per 1000 lines."""
        thousands = self.lines / 1000
        lengths = sorted(self.function_lines)
        return {
            "root_modules": len(root_modules()),
            "packages": len(packages()),
            "imports_between_packages": len(package_imports()),
            "lines": self.lines,
            "files": self.files,
            "longest_file": self.longest_file,
            "functions_per_1000_lines": round(len(lengths) / thousands, 1),
            "function_lines_p95": lengths[int(0.95 * len(lengths))],
            "function_lines_max": lengths[-1],
            "function_lines_median": statistics.median(lengths),
            "comprehensions_per_1000_lines": round(self.comprehensions / thousands, 1),
            "nested_comprehensions": self.nested_comprehensions,
            "walruses_per_1000_lines": round(self.walruses / thousands, 2),
            "comments_per_100_lines": round(self.comments / self.lines * 100, 2),
            "docstrings_that_begin_with_a_question_word": self.riddles,
            "tensor_functions": self.tensor_functions,
            "tensor_functions_without_shapes": self.shapeless_tensor_functions,
            "class_names_in_two_files": self.shared_class_names,
        }


def product_files() -> Iterator[Path]:
    """Yield every Python file of the product."""
    for folder in PRODUCT_FOLDERS:
        yield from sorted((ROOT / folder).rglob("*.py"))


def root_modules() -> list[str]:
    """Return the modules that lie directly in `mmrl`, without `__init__` and `__main__`, and the package `types`."""
    modules = [path.stem for path in (ROOT / "mmrl").glob("*.py") if not path.stem.startswith("__")]
    return sorted([*modules, "types"])


def packages() -> list[str]:
    """Return the packages of `mmrl` that imports are counted between."""
    return sorted(path.parent.name for path in (ROOT / "mmrl").glob("*/__init__.py"))


def package_of(module: str) -> str | None:
    """Return the package of a dotted name, such as `learner` or `mmrl_rewards`; None for a library."""
    parts = module.split(".")
    if parts[0] in ("mmrl_rewards", "mmrl_datasets"):
        return parts[0]
    if parts[0] != "mmrl" or len(parts) == 1:
        return None
    return parts[1]


def package_imports() -> set[tuple[str, str]]:
    """Return every pair of packages of which the first imports the second, wherever in a file."""
    found = set()
    known = {*packages(), *root_modules(), "mmrl_rewards", "mmrl_datasets"}
    for path in product_files():
        if path == ROOT / "mmrl" / "__init__.py":  # names all that is public
            continue
        here = package_of(module_name(path))
        for name in imported_names(path.read_text(encoding="utf-8")):
            there = package_of(name)
            if here and there in known and here != there:
                found.add((here, there))
    return found


def module_name(path: Path) -> str:
    """Return the dotted name that a file is imported by."""
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts if parts[0] == "mmrl" else parts[1:])


def imported_names(source: str) -> Iterator[str]:
    """Yield the dotted name of everything that a file imports."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def measure() -> Measures:
    """Read every file of the product once."""
    measures = Measures()
    for path in product_files():
        measure_file(path, measures)
    return measures


def measure_file(path: Path, measures: Measures) -> None:
    """Add one file to the measures."""
    name = str(path.relative_to(ROOT))
    source = path.read_text(encoding="utf-8")
    lines = source.splitlines()
    tree = ast.parse(source)
    measures.lines += len(lines)
    measures.files += 1
    measures.longest_file = max(measures.longest_file, len(lines))
    measures.comments += sum(re.search(r"(^|\s)#(?!!)", line) is not None for line in lines)
    for node in ast.walk(tree):
        if isinstance(node, COMPREHENSIONS):
            measures.comprehensions += 1
            if is_nested(node):
                measures.nested_comprehensions.append(f"{name}:{node.lineno}")
        elif isinstance(node, ast.NamedExpr):
            measures.walruses += 1
        elif isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
            measures.class_files.setdefault(node.name, []).append(name)
        if isinstance(node, FUNCTIONS):
            measures.function_lines.append((node.end_lineno or node.lineno) - node.lineno + 1)
            measure_tensor_function(node, name, measures)
        if isinstance(node, DOCUMENTED):
            docstring = ast.get_docstring(node) or ""
            if docstring.startswith(RIDDLE_WORDS):
                measures.riddles.append(f"{name}:{getattr(node, 'lineno', 1)}")


def is_nested(node: ast.AST) -> bool:
    """Return True for a comprehension that has another inside it."""
    return any(isinstance(inner, COMPREHENSIONS) for inner in ast.walk(node) if inner is not node)


def measure_tensor_function(node: ast.FunctionDef | ast.AsyncFunctionDef, name: str, measures: Measures) -> None:
    """Count a public function of the model's packages that takes or returns a tensor, and note one without shapes.

    A shape is named by brackets in the docstring, `[batch, length]`, or by suffix letters, `logits_TV`.
    """
    if node.name.startswith("_") or not name.startswith(TENSOR_FOLDERS):
        return
    arguments = [*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs]
    annotated = [(argument.arg, ast.unparse(argument.annotation)) for argument in arguments if argument.annotation]
    tensors = [argument for argument, annotation in annotated if re.search(r"\bTensor\b", annotation)]
    returns_tensor = node.returns is not None and re.search(r"\bTensor\b", ast.unparse(node.returns))
    if not tensors and not returns_tensor:
        return
    measures.tensor_functions += 1
    docstring = ast.get_docstring(node) or ""
    has_shapes = re.search(r"\[[^\]]*\]|scalar|shape", docstring) is not None
    all_suffixed = bool(tensors) and all(re.search(r"_[0-9A-Z]+$", argument) for argument in tensors)
    if not has_shapes and not (all_suffixed and not returns_tensor):
        measures.shapeless_tensor_functions.append(f"{name}:{node.lineno} {node.name}")


def format_value(value: float | int | Sequence[str]) -> str:
    """Return a number as text, or the number of entries in a list with the first few."""
    if isinstance(value, int | float):
        return f"{value:,}" if isinstance(value, int) else str(value)
    return f"{len(value)}  {', '.join(value[:4])}{' ...' if len(value) > 4 else ''}" if value else "0"


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true", help="print JSON")
    options = parser.parse_args()
    summary = measure().summary()
    if options.json:
        print(json.dumps(summary, indent=1))
        return
    for name, value in summary.items():
        print(f"{name.replace('_', ' '):<46} {format_value(value)}")


if __name__ == "__main__":
    main()
