"""Plays scenes in a process of its own: usage `engine_worker.py FOLDER`, which has them in questions.pkl by name.

What they find out goes to facts.json. A name is that of a function, and after a colon what tells two of them apart.
"""

from __future__ import annotations

import json
import os
import pickle
import sys
from pathlib import Path

import torch
from vllm_scenes import Questions

from mmrl.rollout.engines.vllm_colocated import vllm_env_vars


def main() -> None:
    folder = Path(sys.argv[1])
    with (folder / "questions.pkl").open("rb") as file:
        asked: dict[str, Questions] = pickle.load(file)
    found = {}
    for name, questions in asked.items():
        print("scene", name, flush=True)
        found[name] = _scene(name.partition(":")[0])(questions)
    (folder / "facts.json").write_text(json.dumps(found), encoding="utf-8")


def _scene(name: str):
    if name.startswith("served"):
        import vllm_served

        return {
            "served": vllm_served.served,
            "served_experts": vllm_served.served_experts,
            "served_hybrid": vllm_served.served_hybrid,
        }[name]
    os.environ.update(vllm_env_vars(cuda=torch.cuda.is_available()))  # the scenes import vLLM before an engine does
    import vllm_in_process

    return {
        "agreement": vllm_in_process.agreement,
        "experts": vllm_in_process.experts,
        "hybrid": vllm_in_process.hybrid,
        "in_process": vllm_in_process.in_process,
        "adapted": vllm_in_process.adapted,
        "float32_layer": vllm_in_process.float32_layer,
    }[name]


if __name__ == "__main__":
    main()
