"""The module of `mmrl train` imports no library that only some runs need."""

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]
# Each takes time to import, and nothing needs it before a model is built or an image, a video or a dataset is read.
IMPORTED_WHEN_USED = (
    *("transformers", "peft", "accelerate", "torchvision", "qwen_vl_utils", "torch._dynamo", "torch._inductor"),
    *("sklearn", "scipy", "pandas", "pyarrow", "datasets", "skimage", "sympy", "timm", "math_verify", "vllm"),
    "deepspeed",
)


def test_the_training_module_leaves_heavy_libraries_to_the_parts_that_use_them():
    code = f"import sys, mmrl.training.run; print(*sorted(set({IMPORTED_WHEN_USED}) & sys.modules.keys()))"
    fresh = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT, check=False)
    assert fresh.returncode == 0, fresh.stderr
    assert fresh.stdout.strip() == ""
