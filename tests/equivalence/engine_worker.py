"""Plays scenes in a process of its own: usage `engine_worker.py FOLDER`, which has their questions in questions.pkl.

What they find goes to facts.json. A scene's name is that of a function; what follows a colon tells two of them apart.
"""

import importlib
import json
import os
import pickle
import sys
from pathlib import Path

import torch

from mmrl.rollout.engines.vllm_colocated import vllm_env_vars

# The fork server puts only the folder of this file on the path.
sys.path.insert(1, str(Path(__file__).parents[1] / "helpers"))

from vllm_scenes import Questions


def main() -> None:
    folder = Path(sys.argv[1])
    asked: dict[str, Questions] = pickle.loads((folder / "questions.pkl").read_bytes())
    found = {}
    for name, questions in asked.items():
        print("scene", name, flush=True)
        if not name.startswith("served"):  # these scenes import vLLM before an engine does
            os.environ.update(vllm_env_vars(cuda=torch.cuda.is_available()))
            # For a class that its cache does not know, vLLM would import itself once more, in another process.
            registry = importlib.import_module("vllm.model_executor.models.registry")
            registry._run_in_subprocess = lambda inspect: inspect()
        module = importlib.import_module("vllm_served" if name.startswith("served") else "vllm_in_process")
        found[name] = getattr(module, name.partition(":")[0])(questions)
    (folder / "facts.json").write_text(json.dumps(found), encoding="utf-8")


if __name__ == "__main__":
    main()
