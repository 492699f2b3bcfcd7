"""Break the code in the places that `mutations.toml` lists, one at a time, and see whether the named test notices.

    python tools/dev/mutate.py                           # all mutations
    python tools/dev/mutate.py --only replay/            # mutations whose id begins so
    python tools/dev/mutate.py --json                    # the outcomes as JSON, by id

Mutations are applied in a temporary copy of the tree, never in the checkout. An outcome is one of these:

    found              the test fails with the mutation and passes without it
    survived           the test passes with the mutation
    no longer applies  the old text is gone, or is in several places
    broken test        the test is gone, or fails without the mutation

A file that was moved is found by the text. The exit code is 0 if all mutations that were tried are found.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
import tomllib
from dataclasses import dataclass
from functools import cache
from pathlib import Path

ROOT = Path(__file__).parents[2]
MUTATIONS = Path(__file__).with_name("mutations.toml")
PRODUCT_FOLDERS = ("mmrl", "rewards", "datasets")
COPIED_FOLDERS = (*PRODUCT_FOLDERS, "tests", "configs", "examples", "tools", "docs")
TESTS_FAILED = 1  # exit code of pytest
TIMEOUT_S = 300.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Mutation:
    """A change of the code that a test should notice."""

    id: str
    file: str  # path from the root of the tree
    old: str  # text that stands once in the file
    new: str
    test: str  # file or node that pytest runs


def load_mutations() -> list[Mutation]:
    """Return the mutations of `mutations.toml`, in order."""
    return [Mutation(**entry) for entry in tomllib.loads(MUTATIONS.read_text())["mutation"]]


def find_file(tree: Path, mutation: Mutation) -> Path | None:
    """Return the file that has the old text once: the named one, else the only one of the product that has it."""
    named = tree / mutation.file
    if named.exists() and named.read_text().count(mutation.old) == 1:
        return named
    files = [path for folder in PRODUCT_FOLDERS for path in (tree / folder).rglob("*.py")]
    having = [path for path in files if mutation.old in path.read_text()]
    return having[0] if len(having) == 1 and having[0].read_text().count(mutation.old) == 1 else None


def copy_tree(tree: Path) -> None:
    """Copy what tests need of the checkout into `tree`."""
    for name in COPIED_FOLDERS:
        shutil.copytree(ROOT / name, tree / name, ignore=shutil.ignore_patterns("__pycache__"))
    for file in filter(Path.is_file, ROOT.iterdir()):
        shutil.copy2(file, tree)


@cache
def run_test(tree: Path, test: str, mutation_id: str = "") -> int:
    """Run a test in the tree, and return the exit code of pytest; once for each mutation. A hanging test has failed."""
    paths = os.pathsep.join(map(str, (tree, tree / "rewards", tree / "datasets")))
    # Without bytecode: a mutation of the same length, made within a second, would be read from the old file's.
    settings = {"PYTHONPATH": paths, "OMP_NUM_THREADS": "1", "PYTHONDONTWRITEBYTECODE": "1"}
    environment = {**os.environ, **settings}
    command = [sys.executable, "-m", "pytest", "-x", "-q", "-p", "no:cacheprovider", test]
    options = {"cwd": tree, "env": environment, "capture_output": True, "timeout": TIMEOUT_S}
    try:
        return subprocess.run(command, check=False, **options).returncode
    except subprocess.TimeoutExpired:
        return TESTS_FAILED


def try_mutation(tree: Path, mutation: Mutation) -> str:
    """Return the outcome of a mutation, and leave the tree as it was."""
    file = find_file(tree, mutation)
    if file is None:
        return "no longer applies"
    if run_test(tree, mutation.test):
        return "broken test"
    file.write_text(file.read_text().replace(mutation.old, mutation.new))
    code = run_test(tree, mutation.test, mutation.id)
    # With its earlier time of change, so that its byte code is valid again.
    shutil.copy2(ROOT / file.relative_to(tree), file)
    return {0: "survived", TESTS_FAILED: "found"}.get(code, "broken test")


def main() -> int:
    """Try the mutations that were asked for."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", metavar="ID", default="", help="the mutations whose id begins so; all by default")
    parser.add_argument("--json", action="store_true", help="print the outcomes as JSON once all are known")
    options = parser.parse_args()
    chosen = [mutation for mutation in load_mutations() if mutation.id.startswith(options.only)]
    outcomes = {}
    with tempfile.TemporaryDirectory() as folder:
        copy_tree(Path(folder))
        for mutation in chosen:
            outcomes[mutation.id] = try_mutation(Path(folder), mutation)
            if not options.json:
                print(f"{outcomes[mutation.id]:18} {mutation.id}", flush=True)
    if options.json:
        print(json.dumps(outcomes, indent=1))
    return 0 if set(outcomes.values()) == {"found"} else 1


if __name__ == "__main__":
    sys.exit(main())
