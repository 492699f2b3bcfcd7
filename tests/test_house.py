"""Rules that ruff and import-linter do not have: where heavy libraries live, light imports, and plain lines.

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
MAX_FUNCTION_LINES, MAX_LAMBDA_CHARS = 60, 40
TENSOR_FOLDERS = ("mmrl/policy/", "mmrl/learner/", "mmrl/algo/")
COMPREHENSIONS = (ast.ListComp, ast.SetComp, ast.DictComp, ast.GeneratorExp)
CODE = ("mmrl", "rewards/mmrl_rewards", "datasets/mmrl_datasets", "tools")

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
    "deepspeed": ("mmrl/learner/optimizer_deepspeed.py",),
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
        "mmrl/data/rows.py",
        "mmrl/learner/loss.py",
        "mmrl/policy/families/base.py",
        "mmrl/rollout/engines/custom.py",
        "mmrl/rollout/steps/custom.py",
        "mmrl/scoring/build.py",
        "mmrl/scoring/registry.py",
        "mmrl/training/functions.py",
    ),
}
# What a reader, a reward process or `mmrl --help` needs: none of these may load a heavy library.
LIGHT = (
    "mmrl",
    "mmrl.api.train",
    "mmrl.api.evaluate",
    "mmrl.api.policy",
    "mmrl.types",
    "mmrl.protocols",
    "mmrl.answer",
    "mmrl.config",
    "mmrl.scoring",
    "mmrl.scoring.lint",
    "mmrl.scoring.registry",
    "mmrl.training.rl",
    "mmrl.training.sft",
    "mmrl.training.callbacks",
    "mmrl.training.preflight",
    "mmrl.training.functions",
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


def imports(source: str) -> Iterator[tuple[int, str]]:
    """Line and full dotted name of everything imported, wherever in the file; a relative import begins with a dot."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            module = "." * node.level + (node.module or "")
            yield from ((node.lineno, f"{module}.{alias.name}") for alias in node.names)


def check_libraries(path: str, source: str) -> Iterator[str]:
    """Heavy libraries stay where they belong."""
    for line, name in imports(source):
        for library, places in ONLY_IN.items():
            inside = path.startswith((*places, "tools/", f"{library.replace('.', '/')}"))
            if f"{name}.".startswith(f"{library}.") and not inside:
                yield f"{path}:{line}: {library} belongs in {', '.join(places)}"


def check_lines(path: str, source: str) -> Iterator[str]:
    """A line holds one idea: no comprehension in another, one walrus a function, short lambdas and functions."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, COMPREHENSIONS) and any(isinstance(each, COMPREHENSIONS) for each in inside(node)):
            yield f"{path}:{node.lineno}: a comprehension inside a comprehension: name the inner one"
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "hasattr":
            yield f"{path}:{node.lineno}: hasattr probes: say what the thing is"
        elif isinstance(node, ast.Lambda) and len(ast.unparse(node)) > MAX_LAMBDA_CHARS:
            yield f"{path}:{node.lineno}: a lambda of {len(ast.unparse(node))} characters: make it a function"
        elif isinstance(node, ast.FunctionDef):
            lines = node.end_lineno - node.lineno + 1
            if lines > MAX_FUNCTION_LINES:
                yield f"{path}:{node.lineno}: {node.name} has {lines} lines, at most {MAX_FUNCTION_LINES}"
            walruses = sum(isinstance(inner, ast.NamedExpr) for inner in ast.walk(node))
            if walruses > 1:
                yield f"{path}:{node.lineno}: {node.name} has {walruses} walruses, at most 1"


def inside(node: ast.AST) -> list[ast.AST]:
    """All nodes below one."""
    return list(ast.walk(node))[1:]


def check_shapes(path: str, source: str) -> Iterator[str]:
    """A public function of the model's packages names the shapes of its tensors: `[batch, length]` or `logits_TV`."""
    if not path.startswith(TENSOR_FOLDERS):
        return
    for node in ast.walk(ast.parse(source)):
        if not isinstance(node, ast.FunctionDef) or node.name.startswith("_"):
            continue
        arguments = [*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs]
        tensors = [argument.arg for argument in arguments if is_tensor(argument.annotation)]
        returns_tensor = is_tensor(node.returns)
        named = re.search(r"\[[^\]]*\]|scalar|shape", ast.get_docstring(node) or "")
        all_suffixed = all(re.search(r"_[0-9A-Z]+$", name) for name in tensors) and not returns_tensor
        if (tensors or returns_tensor) and not named and not all_suffixed:
            yield f"{path}:{node.lineno}: {node.name} names no shape"


def is_tensor(annotation: ast.expr | None) -> bool:
    return annotation is not None and re.search(r"\bTensor\b", ast.unparse(annotation)) is not None


CHECKS = (check_libraries, check_lines, check_shapes)
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


def test_contributing_shows_the_layers_that_import_linter_holds():
    pyproject = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    layers = []
    for layer in pyproject["tool"]["importlinter"]["contracts"][0]["layers"]:
        layers.append({name.strip().removeprefix("mmrl.") for name in layer.split("|")})
    table = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8").split("```")[1]
    shown = [set(re.split(" {3,}", line[3:])[0].split()) for line in table.strip().splitlines()]
    assert shown == [layer for layer in layers if layer != {"__main__"}]
    packages = {path.parent.name for path in (ROOT / "mmrl").glob("*/__init__.py")}
    assert packages | {"protocols", "mmrl_rewards", "mmrl_datasets"} == set().union(*shown)


def test_imports_keep_to_the_contracts():
    pytest.importorskip("importlinter")
    code = "from importlinter.cli import lint_imports; raise SystemExit(lint_imports(cache_dir=None))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT, check=False)
    assert done.returncode == 0, done.stdout


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
    (check_libraries, "mmrl/training/rl.py", "import torch", "torch belongs in"),
    (check_libraries, "mmrl/config/load.py", "from torch.nn import functional", "torch belongs in"),
    (check_libraries, "mmrl/learner/learner.py", "import transformers.models", "transformers belongs in"),
    (check_libraries, "mmrl/learner/learner.py", "from torch import distributed", "torch.distributed belongs in"),
    (check_libraries, "mmrl/rollout/engines/hf.py", "import vllm", "vllm belongs in"),
    (check_libraries, "mmrl/training/rl.py", "from mmrl.utils.plugins import x", "mmrl.utils.plugins belongs in"),
    (check_lines, "mmrl/a.py", "f = [y for x in [z for z in a] for y in x]", "a comprehension inside a comprehension"),
    (check_lines, "mmrl/a.py", "hasattr(x, 'y')", "hasattr"),
    (check_lines, "mmrl/a.py", "def f():\n    a = (b := 1) + (c := 2)", "f has 2 walruses"),
    (check_lines, "mmrl/a.py", "f = lambda first, second: first + second * first", "a lambda of 44 characters"),
    (check_lines, "mmrl/a.py", "def f():\n" + "    x = 1\n" * 60, "f has 61 lines"),
    (check_shapes, "mmrl/algo/a.py", 'def f(x: Tensor) -> Tensor:\n    """Return it."""', "f names no shape"),
]


@pytest.mark.parametrize(("check", "path", "source", "complaint"), PROVOCATIONS)
def test_each_rule_can_fail(check, path, source, complaint):
    complaints = list(check(path, source))
    assert len(complaints) == 1
    assert complaint in complaints[0]


@pytest.mark.parametrize(
    ("check", "path", "source"),
    [
        (check_libraries, "mmrl/algo/losses.py", "import torch\nimport torchvision"),
        (check_libraries, "tools/bench/a.py", "import torch, vllm, deepspeed"),
        (check_lines, "mmrl/a.py", "def f():\n    if x := 1:\n        return [y for y in x], lambda z: z"),
        (check_shapes, "mmrl/algo/a.py", 'def f(x: Tensor) -> Tensor:\n    """Return it, [batch]."""'),
        (check_shapes, "mmrl/algo/a.py", 'def f(x_BT: Tensor) -> None:\n    """Print it."""'),
        (check_shapes, "mmrl/media/a.py", 'def f(x: Tensor) -> Tensor:\n    """Return it."""'),
    ],
)
def test_what_is_allowed_passes(check, path, source):
    assert list(check(path, source)) == []
