"""The rules of the house: who may import whom, where heavy libraries live, and the numbers in CONTRIBUTING.md.

Each rule is a function from source text to complaints. The tests at the end prove that each rule can fail.
"""

import ast
import re
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT / "tools" / "dev"))

import measure  # noqa: E402

CODE = ("mmrl", "rewards/mmrl_rewards", "datasets/mmrl_datasets", "tools")

# A package imports from lower floors, or from itself. `mmrl` is the package itself: its version.
FLOORS = {
    13: ("tools",),
    12: ("__main__",),
    11: ("cli",),
    10: ("data_check", "api"),
    9: ("training",),
    8: ("evaluation",),
    7: ("scoring",),
    6: ("rollout",),
    5: ("learner", "checkpoint", "data"),
    4: ("policy", "benchmarks"),
    3: ("algo", "distributed", "log", "media", "mmrl_rewards", "mmrl_datasets"),
    2: ("config", "answer", "utils", "ports"),
    1: ("types",),
    0: ("mmrl",),
}
MAX_PACKAGES, MAX_IMPORTS_BETWEEN_PACKAGES = 24, 144
# Where a library may be imported that is heavy, or dangerous in the wrong place. tools/ may import all of them.
ONLY_IN = {
    "torch": (
        "mmrl/utils/torch_",
        "mmrl/algo/",
        "mmrl/media/",
        "mmrl/policy/",
        "mmrl/rollout/",
        "mmrl/learner/",
        "mmrl/checkpoint/",
        "mmrl/distributed/",
        "mmrl/training/build.py",
        "rewards/mmrl_rewards/services/encoder.py",
    ),
    "torch.distributed": ("mmrl/distributed/torch_ranks.py",),
    "transformers": ("mmrl/policy/", "mmrl/rollout/engines/hf.py"),
    "tokenizers": ("mmrl/policy/",),
    "peft": ("mmrl/policy/lora.py",),
    "safetensors": ("mmrl/policy/", "mmrl/checkpoint/", "mmrl/rollout/engines/vllm_weight_transfer.py"),
    "vllm": ("mmrl/rollout/engines/vllm_",),
    "deepspeed": ("mmrl/learner/engine_deepspeed.py",),
    "sklearn": ("datasets/mmrl_datasets/",),
    "skimage": ("datasets/mmrl_datasets/", "rewards/mmrl_rewards/render.py"),
    "timm": ("rewards/mmrl_rewards/services/encoder.py",),
    "resvg_py": ("rewards/mmrl_rewards/services/drawing.py",),
    "ziamath": ("rewards/mmrl_rewards/services/drawing.py",),
    "datasets": ("datasets/mmrl_datasets/",),
    "pyarrow": ("datasets/mmrl_datasets/formats/tables.py",),
    "qwen_vl_utils": ("mmrl/media/",),
    "av": ("mmrl/media/", "datasets/mmrl_datasets/media_files.py"),  # reading, and writing
    "decord": ("mmrl/media/",),
    "simplejpeg": ("mmrl/media/",),
    "jsonschema": ("rewards/mmrl_rewards/schema.py",),
    "math_verify": ("rewards/mmrl_rewards/maths.py",),
    "rich": ("mmrl/log/", "mmrl/cli/"),
    "mmrl.utils.plugins": (  # where names become functions
        "mmrl/algo/advantages.py",
        "mmrl/benchmarks/registry.py",
        "mmrl/cli/data.py",
        "mmrl/cli/main.py",  # describes their errors
        "mmrl/data/context.py",
        "mmrl/data/load.py",
        "mmrl/learner/objective.py",
        "mmrl/policy/families/base.py",
        "mmrl/rollout/engines/custom.py",
        "mmrl/rollout/steps/custom.py",
        "mmrl/scoring/build.py",
        "mmrl/scoring/registry.py",
        "mmrl/training/callbacks.py",
    ),
}
# Who may open an image: the package for media that are given, and the service for images that one's own renderer drew.
OPENERS = ("mmrl/media/", "rewards/mmrl_rewards/services/renderer.py")
# What a reader, a reward process or `mmrl --help` needs: none of these may load a heavy library.
LIGHT = (
    "mmrl",
    "mmrl.api.train",
    "mmrl.api.evaluate",
    "mmrl.api.policy",
    "mmrl.types",
    "mmrl.ports",
    "mmrl.answer",
    "mmrl.config",
    "mmrl.scoring",
    "mmrl.scoring.lint",
    "mmrl.scoring.registry",
    "mmrl.training.rl",
    "mmrl.training.sft",
    "mmrl.training.callbacks",
    "mmrl.training.early_checks",
    "mmrl.evaluation.eval_settings",
    "mmrl.rollout.available",
    "mmrl.benchmarks.registry",
    "mmrl.cli",
    "mmrl_rewards.box",
    "mmrl_rewards.cases",
    "mmrl_rewards.choice",
    "mmrl_rewards.classify",
    "mmrl_rewards.count",
    "mmrl_rewards.detect",
    "mmrl_rewards.format",
    "mmrl_rewards.gui",
    "mmrl_rewards.jigsaw",
    "mmrl_rewards.judge",
    "mmrl_rewards.length",
    "mmrl_rewards.maths",
    "mmrl_rewards.number",
    "mmrl_rewards.ocr",
    "mmrl_rewards.point",
    "mmrl_rewards.ranking",
    "mmrl_rewards.reasoning",
    "mmrl_rewards.render",
    "mmrl_rewards.schema",
    "mmrl_rewards.span",
    "mmrl_rewards.table",
    "mmrl_rewards.text",
    "mmrl_rewards.video",
    "mmrl_datasets.readers.chat",
    "mmrl_datasets.readers.coco",
    "mmrl_datasets.readers.table",
    "mmrl_datasets.readers.vlmevalkit",
)
HEAVY = (
    *("torch", "torchvision", "transformers", "sklearn", "skimage", "vllm", "deepspeed", "pyarrow", "datasets"),
    *("sympy", "math_verify", "timm"),
)

MAX_LINES, MAX_LINES_OF = 500, {"mmrl/training/rl.py": 120}
MAX_FUNCTION_LINES, MAX_NESTING, MAX_PARAMETERS, MAX_LAMBDA_CHARS = 60, 4, 8, 40
PLUG_INS = ("datasets/mmrl_datasets/", "rewards/mmrl_rewards/")
DOCUMENTED = ("mmrl/", "rewards/mmrl_rewards/", "datasets/mmrl_datasets/")

FLOOR_OF = {package: floor for floor, names in FLOORS.items() for package in names}
NESTING = (ast.If, ast.For, ast.While, ast.With, ast.Try, ast.Match)


def package_of_file(path: str) -> str:
    """Return `policy` for `mmrl/policy/logprobs.py` and `mmrl_rewards` for `rewards/mmrl_rewards/box.py`."""
    parts = path.removesuffix(".py").split("/")
    if parts[0] == "mmrl":
        return "mmrl" if parts[1] == "__init__" else parts[1]
    return "tools" if parts[0] == "tools" else parts[1]


def package_of_import(name: str) -> str | None:
    """Return the package of a dotted name, None for a library."""
    package, _, rest = name.partition(".")
    if package != "mmrl":
        return package if package in FLOOR_OF else None
    room = rest.split(".")[0]
    return room if room in FLOOR_OF else "mmrl"


def imports(source: str) -> Iterator[tuple[int, str]]:
    """Line and full dotted name of everything imported, wherever in the file; a relative import begins with a dot."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            module = "." * node.level + (node.module or "")
            yield from ((node.lineno, f"{module}.{alias.name}") for alias in node.names)


def check_direction(path: str, source: str) -> Iterator[str]:
    """Imports of our own code go down."""
    if path == "mmrl/__init__.py":  # names all that is public, and imports it when it is first used
        return
    here = package_of_file(path)
    if here not in FLOOR_OF:
        yield f"{path}: the package {here!r} is not in FLOORS"
        return
    for line, name in imports(source):
        there = package_of_import(name)
        if there is None or there == here:
            continue
        if there == "mmrl" and here != "tools" and name not in ("mmrl", "mmrl.__version__"):
            yield f"{path}:{line}: {name} is for users: import it from the module that defines it"
        if FLOOR_OF[there] >= FLOOR_OF[here]:
            yield f"{path}:{line}: {here} (floor {FLOOR_OF[here]}) imports {there} (floor {FLOOR_OF[there]})"


def check_libraries(path: str, source: str) -> Iterator[str]:
    """Heavy libraries stay where they belong."""
    for line, name in imports(source):
        for library, places in ONLY_IN.items():
            inside = path.startswith((*places, "tools/", f"{library.replace('.', '/')}"))
            if f"{name}.".startswith(f"{library}.") and not inside:
                yield f"{path}:{line}: {library} belongs in {', '.join(places)}"


def check_constructs(path: str, source: str) -> Iterator[str]:
    """No broad except, no probing, no relative import, no global state; media are opened in mmrl/media alone."""
    yield from (f"{path}:{line}: relative import {name}" for line, name in imports(source) if name.startswith("."))
    for node in ast.walk(ast.parse(source)):
        match node:
            case ast.ExceptHandler(type=None):
                yield f"{path}:{node.lineno}: bare except"
            case ast.ExceptHandler(type=broad) if "Exception" in (ast.unparse(part) for part in ast.walk(broad)):
                yield f"{path}:{node.lineno}: except Exception hides errors: name those you can answer"
            case ast.Call(func=ast.Name(id="hasattr")):
                yield f"{path}:{node.lineno}: hasattr probes: say what the thing is"
            case ast.Global():
                yield f"{path}:{node.lineno}: global state"
            case ast.Call(func=ast.Attribute(attr="open", value=ast.Name(id="Image"))) if not path.startswith(OPENERS):
                yield f"{path}:{node.lineno}: only mmrl/media opens images"


def check_sizes(path: str, source: str) -> Iterator[str]:
    """Files, functions, nesting and parameter lists fit in a head."""
    lines, limit = len(source.splitlines()), MAX_LINES_OF.get(path, MAX_LINES)
    if lines > limit:
        yield f"{path}: {lines} lines, at most {limit}"
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            measures = {
                "lines": (node.end_lineno - node.lineno + 1, MAX_FUNCTION_LINES),
                "levels of nesting": (nesting(node), MAX_NESTING),
                "parameters": (parameters(node.args, path), MAX_PARAMETERS),
            }
            for what, (count, most) in measures.items():
                if count > most:
                    yield f"{path}:{node.lineno}: {node.name} has {count} {what}, at most {most}"


def check_lines(path: str, source: str) -> Iterator[str]:
    """A line holds one idea: no comprehension in another, one walrus a function, short lambdas."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, measure.COMPREHENSIONS) and measure.is_nested(node):
            yield f"{path}:{node.lineno}: a comprehension inside a comprehension: name the inner one"
        elif isinstance(node, ast.Lambda) and len(ast.unparse(node)) > MAX_LAMBDA_CHARS:
            yield f"{path}:{node.lineno}: a lambda of {len(ast.unparse(node))} characters: make it a function"
        elif isinstance(node, ast.FunctionDef):
            walruses = sum(isinstance(inner, ast.NamedExpr) for inner in ast.walk(node))
            if walruses > 1:
                yield f"{path}:{node.lineno}: {node.name} has {walruses} walruses, at most 1"


def nesting(node: ast.AST) -> int:
    """Depth of the deepest block statement; an elif is no deeper than its if."""
    deepest = 0
    for field, value in ast.iter_fields(node):
        for child in value if isinstance(value, list) else [value]:
            if isinstance(child, ast.AST):
                is_elif = isinstance(node, ast.If) and field == "orelse" and isinstance(child, ast.If)
                deepest = max(deepest, nesting(child) + (isinstance(child, NESTING) and not is_elif))
    return deepest


def parameters(args: ast.arguments, path: str) -> int:
    """Parameters a caller may give; the keyword-only ones of a plug-in are keys of YAML and do not count."""
    names = [arg.arg for arg in (*args.posonlyargs, *args.args)]
    names += [] if path.startswith(PLUG_INS) else [arg.arg for arg in args.kwonlyargs]
    return len([name for name in names if name not in ("self", "cls")]) + bool(args.vararg) + bool(args.kwarg)


def check_docstrings(path: str, source: str) -> Iterator[str]:
    """What others call says what it does."""
    if not path.startswith(DOCUMENTED):
        return
    tree = ast.parse(source)
    if not ast.get_docstring(tree):
        yield f"{path}: the module has no docstring"
    public = [node for node in tree.body if is_public(node)]
    methods = [child for node in public if isinstance(node, ast.ClassDef) for child in node.body if is_public(child)]
    for node in (*public, *methods):
        if not ast.get_docstring(node):
            yield f"{path}:{node.lineno}: {node.name} has no docstring"


def is_public(node: ast.AST) -> bool:
    """Functions and classes without a leading underscore."""
    return isinstance(node, ast.FunctionDef | ast.ClassDef) and not node.name.startswith("_")


CHECKS = (check_direction, check_libraries, check_constructs, check_lines, check_sizes, check_docstrings)
PRODUCT = ("mmrl/", "rewards/mmrl_rewards/", "datasets/mmrl_datasets/")
FILES = sorted(str(path.relative_to(ROOT)) for place in CODE for path in (ROOT / place).rglob("*.py"))


@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__)
def test_the_house_obeys(check):
    complaints = [complaint for path in FILES for complaint in check(path, (ROOT / path).read_text(encoding="utf-8"))]
    assert not complaints, "\n" + "\n".join(complaints)


def test_the_check_sees_the_code():
    assert len(FILES) > 30
    assert {"mmrl/training/rl.py", "rewards/mmrl_rewards/box.py"} < set(FILES)


def test_nothing_shadows_hugging_face_datasets():
    assert not (ROOT / "datasets" / "__init__.py").exists()
    assert not (ROOT / "rewards" / "__init__.py").exists()


def test_contributing_shows_every_package_on_its_floor():
    table = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8").split("```")[1]
    shown, floor = {}, 0
    for line in table.strip().splitlines():
        number, names = line[:2].strip(), re.split(" {3,}", line[3:])[0]
        floor = int(number) if number else floor
        shown |= dict.fromkeys(names.split(), floor)
    hidden = ("__main__", "mmrl", "tools")
    assert shown == {package: floor for package, floor in FLOOR_OF.items() if package not in hidden}


MEASURES = measure.measure()
SUMMARY = MEASURES.summary()


def test_the_root_has_two_modules():
    assert measure.root_modules() == ["ports", "types"]


def test_packages_and_imports_between_them_are_few():
    assert len(measure.packages()) <= MAX_PACKAGES
    assert len(measure.package_imports()) <= MAX_IMPORTS_BETWEEN_PACKAGES


@pytest.mark.parametrize(
    ("name", "limit"),
    [
        ("comprehensions_per_1000_lines", 20),
        ("walruses_per_1000_lines", 0.3),
        ("function_lines_p95", 30),
        ("function_lines_max", 60),
        ("longest_file", 500),
        ("functions_per_1000_lines", 50),
        ("lines", 51_200),
    ],
)
def test_a_measure_keeps_to_its_limit(name, limit):
    assert SUMMARY[name] <= limit


@pytest.mark.parametrize(
    "name",
    ["nested_comprehensions", "docstrings_that_begin_with_a_question_word", "tensor_functions_without_shapes"],
)
def test_a_list_of_offenders_is_empty(name):
    assert SUMMARY[name] == []


def test_few_class_names_live_in_two_files():
    assert len(MEASURES.shared_class_names) <= 5


def test_every_package_is_shipped():
    listed = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]["packages"]
    shipped = [path for path in FILES if path.endswith("__init__.py")]
    found = {".".join(Path(path).parts[not path.startswith("mmrl/") : -1]) for path in shipped}
    assert sorted(listed) == sorted(found)


def test_light_modules_load_no_heavy_library():
    code = f"import sys, {', '.join(LIGHT)}; print(*sorted(set({HEAVY}) & sys.modules.keys()))"
    fresh = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT, check=False)
    assert fresh.returncode == 0, fresh.stderr
    assert fresh.stdout.strip() == ""


PROVOCATIONS = [
    (
        check_direction,
        "mmrl/algo/a.py",
        "from mmrl.policy.logprobs import x",
        "algo (floor 3) imports policy (floor 4)",
    ),
    (check_direction, "mmrl/types/a.py", "import mmrl.ports", "types (floor 1) imports ports (floor 2)"),
    (check_direction, "mmrl/learner/a.py", "from mmrl.data.load import x", "learner (floor 5) imports data (floor 5)"),
    (check_direction, "mmrl/media/a.py", "from mmrl import policy", "imports policy"),
    (
        check_direction,
        "mmrl/log/a.py",
        "def f():\n    from mmrl import cli",
        ":2: log (floor 3) imports cli (floor 11)",
    ),
    (check_direction, "mmrl/algo/a.py", "from mmrl import Sample", "mmrl.Sample is for users"),
    (check_direction, "mmrl/attic.py", "", "the package 'attic' is not in FLOORS"),
    (check_direction, "mmrl/cli/main.py", "import tools.bench", "cli (floor 11) imports tools (floor 13)"),
    (check_direction, "rewards/mmrl_rewards/box.py", "import mmrl.scoring", "mmrl_rewards (floor 3) imports scoring"),
    (check_direction, "mmrl/types/a.py", "import mmrl_rewards.box", "types (floor 1) imports mmrl_rewards"),
    (check_libraries, "mmrl/training/rl.py", "import torch", "torch belongs in"),
    (check_libraries, "mmrl/config/load.py", "from torch.nn import functional", "torch belongs in"),
    (check_libraries, "mmrl/learner/learner.py", "import transformers.models", "transformers belongs in"),
    (check_libraries, "mmrl/learner/learner.py", "from torch import distributed", "torch.distributed belongs in"),
    (check_libraries, "mmrl/rollout/engines/hf.py", "import vllm", "vllm belongs in"),
    (check_libraries, "mmrl/training/rl.py", "from mmrl.utils.plugins import x", "mmrl.utils.plugins belongs in"),
    (check_constructs, "mmrl/a.py", "from . import types", "relative import"),
    (check_constructs, "mmrl/a.py", "try: f()\nexcept: pass", "bare except"),
    (check_constructs, "mmrl/a.py", "try: f()\nexcept Exception: pass", "except Exception"),
    (check_constructs, "mmrl/a.py", "try: f()\nexcept (OSError, Exception) as e: pass", "except Exception"),
    (check_constructs, "mmrl/a.py", "hasattr(x, 'y')", "hasattr"),
    (check_constructs, "mmrl/a.py", "def f():\n    global x", "global state"),
    (check_constructs, "mmrl/a.py", "Image.open(p)", "only mmrl/media opens images"),
    (check_lines, "mmrl/a.py", "f = [y for x in [z for z in a] for y in x]", "a comprehension inside a comprehension"),
    (check_lines, "mmrl/a.py", "def f():\n    a = (b := 1) + (c := 2)", "f has 2 walruses"),
    (check_lines, "mmrl/a.py", "f = lambda first, second: first + second * first", "a lambda of 44 characters"),
    (check_sizes, "mmrl/a.py", "x = 1\n" * 501, "501 lines, at most 500"),
    (check_sizes, "mmrl/training/rl.py", "x = 1\n" * 121, "121 lines, at most 120"),
    (check_sizes, "mmrl/a.py", "def f():\n" + "    x = 1\n" * 60, "f has 61 lines, at most 60"),
    (check_sizes, "mmrl/a.py", "def f(a, b, c, d, e, f, *, g, h, **i): pass", "f has 9 parameters, at most 8"),
    (
        check_sizes,
        "mmrl/a.py",
        "def f():\n for a in b:\n  if a:\n   pass\n  else:\n   with c:\n    while d:\n     if e:\n      pass",
        "f has 5 levels of nesting, at most 4",
    ),
    (check_docstrings, "mmrl/algo/a.py", "x = 1", "the module has no docstring"),
    (check_docstrings, "mmrl/algo/a.py", '"""Doc."""\ndef f(): pass', "f has no docstring"),
    (
        check_docstrings,
        "rewards/mmrl_rewards/a.py",
        '"""D."""\nclass A:\n    """D."""\n    def m(self): pass',
        "m has no",
    ),
]


@pytest.mark.parametrize(("check", "path", "source", "complaint"), PROVOCATIONS)
def test_each_rule_can_fail(check, path, source, complaint):
    complaints = list(check(path, source))
    assert len(complaints) == 1
    assert complaint in complaints[0]


@pytest.mark.parametrize(
    ("check", "path", "source"),
    [
        (check_direction, "mmrl/training/a.py", "from mmrl.policy.logprobs import x\nimport mmrl_rewards.box"),
        (check_direction, "mmrl/rollout/a.py", "from mmrl.policy.logprobs import x\nfrom mmrl.rollout import y"),
        (check_direction, "mmrl/log/run_dir.py", "from mmrl import __version__"),
        (check_direction, "tools/bench/a.py", "import mmrl.cli, tools.bench.b, json\nfrom mmrl import Sample"),
        (check_libraries, "mmrl/algo/losses.py", "import torch\nimport torchvision"),
        (check_libraries, "tools/bench/a.py", "import torch, vllm, deepspeed"),
        (check_constructs, "mmrl/media/image.py", "Image.open(p)\ntry: f()\nexcept (OSError, ValueError): g()"),
        (check_lines, "mmrl/a.py", "def f():\n    if x := 1:\n        return [y for y in x], lambda z: z"),
        (check_sizes, "mmrl/a.py", "def f(self, a, b, c, d, e, f, g, h): pass"),
        (check_sizes, "mmrl/a.py", "def f():\n if a: pass\n elif b: pass\n elif c: pass\n elif d: pass\n elif e: pass"),
        (check_docstrings, "mmrl/algo/a.py", '"""D."""\ndef _f(): pass\ndef f():\n    """D."""\n    def g(): pass'),
        (check_docstrings, "tools/a.py", "def f(): pass"),
    ],
)
def test_what_is_allowed_passes(check, path, source):
    assert list(check(path, source)) == []
