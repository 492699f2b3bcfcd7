"""What a user does after one another, in one process, which loads torch and vLLM once: usage `vllm_user.py FOLDER`.

FOLDER has it in steps.json: commands of `mmrl`, models with questions to them, and at last a command that is refused.
Answers go to answers.json, and what the refused command prints to refusal.txt.
"""

import gc
import json
import os
import sys
from contextlib import redirect_stderr
from pathlib import Path
from typing import Any

import torch

from mmrl.cli import main
from mmrl.rollout.engines.vllm_colocated import vllm_env_vars


def ask(model: str, questions: list[dict[str, Any]]) -> list[list[int]]:
    """Greedy answers of vLLM to chats, by the folder alone: its weights, processor, chat template and ends."""
    from PIL import Image
    from vllm import LLM, SamplingParams
    from vllm.distributed import cleanup_dist_env_and_memory
    from vllm.lora.request import LoRARequest
    from vllm.model_executor.models import registry

    adapters = any(question["adapter"] for question in questions)
    # For a class that its cache does not know, vLLM would import itself once more, in another process.
    registry._run_in_subprocess = lambda inspect: inspect()
    llm = LLM(
        model,
        dtype=questions[0].get("dtype", "float32"),
        enforce_eager=True,
        max_model_len=512,
        kv_cache_memory_bytes=2**26,
        enable_lora=adapters,
        max_lora_rank=8,
    )
    answers = []
    for question in questions:
        content = [
            {"type": "image_pil", "image_pil": Image.open(question["image"]).convert("RGB")},
            {"type": "text", "text": question["text"]},
        ]
        (answer,) = llm.chat(
            [{"role": "user", "content": content}],
            SamplingParams(temperature=0.0, max_tokens=8),
            lora_request=LoRARequest("adapter", 1, question["adapter"]) if question["adapter"] else None,
            use_tqdm=False,
        )
        answers.append(list(answer.outputs[0].token_ids))
    llm.llm_engine.engine_core.shutdown()
    del llm
    gc.collect()
    cleanup_dist_env_and_memory()
    return answers


if __name__ == "__main__":
    os.environ.update(vllm_env_vars(cuda=torch.cuda.is_available()))
    folder = Path(sys.argv[1])
    answers: dict[str, list[list[int]]] = {}
    for step in json.loads((folder / "steps.json").read_text()):
        if isinstance(step, dict) and "refused" in step:
            with (folder / "refusal.txt").open("w") as refusal, redirect_stderr(refusal):
                print("exit code", main(step["refused"]), file=refusal)
        elif isinstance(step, dict):
            answers |= {model: ask(model, questions) for model, questions in step.items()}
        elif code := main(step):
            sys.exit(code)
    (folder / "answers.json").write_text(json.dumps(answers))
