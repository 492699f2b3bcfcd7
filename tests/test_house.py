"""Rules that ruff and import-linter do not have: where heavy libraries live, light imports, and shapes of tensors."""

import ast
import re
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
TENSOR_FOLDERS = ("mmrl/policy/", "mmrl/learner/", "mmrl/algo/")
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
        "mmrl/plan/",
        "rewards/mmrl_rewards/services/encoder.py",
        "rewards/mmrl_rewards/adapters.py",  # the tensors that OpenRLHF takes
    ),
    "torch.distributed": ("mmrl/distributed/torch_ranks.py",),
    "transformers": (
        "mmrl/policy/",
        "mmrl/plan/",
        "mmrl/rollout/engines/hf.py",
        "rewards/mmrl_rewards/services/encoder.py",
    ),
    "tokenizers": ("mmrl/policy/",),
    "peft": ("mmrl/policy/lora.py",),
    "safetensors": ("mmrl/policy/", "mmrl/checkpoint/", "mmrl/rollout/engines/vllm_weight_transfer.py"),
    "vllm": ("mmrl/rollout/engines/vllm_",),
    "deepspeed": ("mmrl/learner/optimizer_deepspeed.py",),
    "sklearn": ("datasets/mmrl_datasets/",),
    "skimage": ("datasets/mmrl_datasets/",),
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
    "pint": ("rewards/mmrl_rewards/services/unit_registry.py",),
    "rich": ("mmrl/log/", "mmrl/cli/"),
    "tensorboard": ("mmrl/log/trackers/backends.py",),
    "wandb": ("mmrl/log/trackers/backends.py",),
    "trackio": ("mmrl/log/trackers/backends.py",),
    "mlflow": ("mmrl/log/trackers/backends.py",),
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
    "mmrl.log.trackers.process",
    "mmrl.rollout.available",
    "mmrl.benchmarks.registry",
    "mmrl.cli",
    *sorted(f"mmrl_rewards.{path.stem}" for path in (ROOT / "rewards" / "mmrl_rewards").glob("[a-z]*.py")),
    "mmrl_datasets.readers.chat",
    "mmrl_datasets.environments.maze",
    "mmrl_datasets.environments.phone",
    "mmrl_datasets.readers.coco",
    "mmrl_datasets.readers.environment",
    "mmrl_datasets.readers.table",
    "mmrl_datasets.readers.vlmevalkit",
)
HEAVY = (
    *("torch", "torchvision", "transformers", "sklearn", "skimage", "vllm", "deepspeed", "pyarrow", "datasets"),
    *("sympy", "math_verify", "pint", "timm"),
)
# Each takes time to import, and nothing needs it before a model is built or an image, a video or a dataset is read.
LOADED_WHEN_USED = (
    *("transformers", "peft", "accelerate", "torchvision", "qwen_vl_utils", "torch._dynamo", "torch._inductor"),
    *("sklearn", "scipy", "pandas", "pyarrow", "datasets", "skimage", "sympy", "timm", "math_verify", "pint", "vllm"),
    "deepspeed",
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


CHECKS = (check_libraries, check_shapes)
FILES = sorted(str(path.relative_to(ROOT)) for place in CODE for path in (ROOT / place).rglob("*.py"))


@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__)
def test_code_obeys_each_house_rule(check):
    complaints = [complaint for path in FILES for complaint in check(path, (ROOT / path).read_text(encoding="utf-8"))]
    assert not complaints, "\n" + "\n".join(complaints)


def test_the_check_sees_the_code():
    assert len(FILES) > 30
    assert {"mmrl/training/rl.py", "rewards/mmrl_rewards/box.py"} < set(FILES)


def test_a_file_has_at_most_500_lines_and_a_class_name_one_file():
    sources = {path: (ROOT / path).read_text(encoding="utf-8") for path in FILES if not path.startswith("tools/")}
    assert not {path for path, source in sources.items() if source.count("\n") > 500}
    files: dict[str, list[str]] = {}
    for path, source in sources.items():
        for node in ast.parse(source).body:
            if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                files.setdefault(node.name, []).append(path)
    assert not {name: paths for name, paths in files.items() if len(paths) > 1}


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


def test_contributing_counts_the_lines_of_the_core_that_it_lists():
    text = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")
    core = text.partition("## The core")[2].partition("\n## ")[0]
    files = {ROOT / path for path in re.findall(r"\]\((mmrl/[^)]*\.py)\)", core)}
    stated = int(re.search(r"some ([\d,]+) lines", core)[1].replace(",", ""))
    lines = sum(len(path.read_text(encoding="utf-8").splitlines()) for path in files)
    assert abs(lines - stated) < 250, lines


def test_every_package_is_shipped():
    listed = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]["packages"]
    shipped = [path for path in FILES if path.endswith("__init__.py")]
    found = {".".join(Path(path).parts[not path.startswith("mmrl/") : -1]) for path in shipped}
    # Recipes and case tables are files that commands read.
    assert sorted(listed) == sorted({*found, "mmrl_configs", "mmrl_cases"})


@pytest.mark.parametrize(
    ("modules", "heavy"), [(LIGHT, HEAVY), (("mmrl.training.run",), LOADED_WHEN_USED)], ids=["light", "training"]
)
def test_modules_load_no_library_that_they_may_not_need(modules, heavy):
    code = f"import sys, {', '.join(modules)}; print(*sorted(set({heavy}) & sys.modules.keys()))"
    fresh = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT, check=False)
    assert fresh.returncode == 0, fresh.stderr
    assert fresh.stdout.strip() == ""


@pytest.mark.parametrize(
    ("check", "path", "source", "complaint"),
    [
        (check_libraries, "mmrl/training/rl.py", "import torch", "torch belongs in"),
        (check_libraries, "mmrl/config/load.py", "from torch.nn import functional", "torch belongs in"),
        (check_libraries, "mmrl/learner/learner.py", "from torch import distributed", "torch.distributed belongs in"),
        (check_shapes, "mmrl/algo/a.py", 'def f(x: Tensor) -> Tensor:\n    """Return it."""', "f names no shape"),
        (check_libraries, "mmrl/algo/losses.py", "import torch\nimport torchvision", None),
        (check_libraries, "tools/bench/a.py", "import torch, vllm, deepspeed", None),
        (check_shapes, "mmrl/algo/a.py", 'def f(x: Tensor) -> Tensor:\n    """Return it, [batch]."""', None),
        (check_shapes, "mmrl/algo/a.py", 'def f(x_BT: Tensor) -> None:\n    """Print it."""', None),
        (check_shapes, "mmrl/media/a.py", 'def f(x: Tensor) -> Tensor:\n    """Return it."""', None),
    ],
)
def test_each_rule_can_fail(check, path, source, complaint):
    complaints = list(check(path, source))
    assert len(complaints) == (complaint is not None)
    assert not complaint or complaint in complaints[0]
