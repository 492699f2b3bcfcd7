"""CPU time of a whole training step, from prompts to new weights, in TRL's GRPOTrainer and here.

    pip install trl
    python tools/bench/run_vs_trl.py                 # 3 pairs
    python tools/bench/run_vs_trl.py --small         # for a smoke test: too small to say anything about speed

Each side of a pair is a new process with one thread that takes one step from the same weights: 4 prompts with a picture
each, 8 responses to each, a reward, a KL penalty, and an update by AdamW. Start and imports are not counted, nor is our
check of the shared prefix, which a run makes once, in its first step: its seconds are printed apart. Ours goes first;
TRL's `generate` is then made to draw the same tokens by masking all others, and is given the same rewards.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Mapping
from concurrent.futures import ProcessPoolExecutor
from functools import wraps
from importlib.util import find_spec
from multiprocessing import get_context
from pathlib import Path
from statistics import median
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from learner_vs_trl import KL_COEF, MODEL, count_digits, write_models
from PIL import Image
from results import format_spread, make_parser, write_results
from transformers import LogitsProcessor, LogitsProcessorList

import mmrl
from mmrl.learner import learner
from mmrl.policy.families import FAMILIES
from mmrl.policy.pretrained import hide_progress_bars
from mmrl.training import callbacks, rl

TARGET = 4.0
# Of the norms of gradients; measured: 2e-5. TRL gives the banned structural tokens a probability, and mmrl does not.
TOLERANCE = 1e-3
PARTS = ("rollout", "learn", "rest")
NUM_PROMPTS, GROUP_SIZE = 4, 8
Sizes = Mapping[str, int]
FULL: Sizes = {"side": 15, "prompt": 300, "completion": 100}  # side of a picture, in tokens; tokens
SMALL: Sizes = {"side": 4, "prompt": 40, "completion": 8}


def write_inputs(folder: Path, sizes: Sizes) -> None:
    """Write the files that both sides read: a model, pictures and questions."""
    processor = write_models(MODEL, {"model": folder / "model"}, "float32")
    digits = count_digits(processor, sizes["prompt"], sizes["side"])
    rows, random_digits = [], random.Random(0)
    for number in range(NUM_PROMPTS):
        pixels = sizes["side"] * MODEL.vision.patch_size * MODEL.vision.spatial_merge_size
        noise = np.random.default_rng(number).integers(0, 256, (pixels, pixels, 3), dtype=np.uint8)
        Image.fromarray(noise).save(folder / f"{number}.png")
        question = "".join(random_digits.choices("0123456789", k=digits))
        rows.append({"id": str(number), "image": f"{number}.png", "question": question, "answer": "1"})
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))


def mmrl_config(folder: Path, sizes: Sizes) -> dict[str, Any]:
    """Return our config; all other settings have their defaults."""
    columns = {"id": "id", "images": "image", "question": "question", "answer": "answer"}
    table = {"path": str(folder / "rows.jsonl"), "answer_type": "number", "columns": columns}
    stage = {"name": "rl", "kind": "rl", "steps": 1, "prompts_per_step": NUM_PROMPTS, "group_size": GROUP_SIZE}
    stage |= {"loss": {"kl": {"coef": KL_COEF}}, "sampling": {"max_new_tokens": sizes["completion"]}}
    reward = {"fn": f"{Path(__file__).with_name('vowels_reward.py')}:vowel_fraction"}
    return {
        "run": {"name": "bench", "dir": str(folder / "run"), "cpu_threads": 1},
        "model": {"path": str(folder / "model"), "dtype": "float32", "device": "cpu"},
        "data": {"train": [{"fn": "mmrl_datasets.readers.table:rows", "args": table}], "media_roots": [str(folder)]},
        "response_format": {"add_instruction": False},
        "rewards": {"terms": [reward]},
        "stages": [stage | {"micro_batch_groups": 1}],
    }


class StepRecorder:
    """Keeps our step: its seconds, its rollouts by sample, and its gradient."""

    step: dict[str, Any]

    def on_step_end(self, state: mmrl.TrainingState, result: mmrl.TrainStepResult) -> None:
        """Keep all of it."""
        rollouts: dict[str, list[Any]] = {}
        for group in result.selected.groups:
            tokens = [list(rollout.segments[0].token_ids) for rollout in group.rollouts]
            rollouts[group.prompt.sample.id.rpartition("/")[2]] = list(zip(tokens, group.totals, strict=True))
        self.step = {"ended": time.process_time(), "rollouts": rollouts}
        self.step |= {"seconds": dict(result.seconds), "grad_norm": result.metrics["learner/grad_norm"]}


def run_mmrl(folder: Path, sizes: Sizes) -> dict[str, Any]:
    """Take our step; return its seconds by part, its rollouts with rewards, and its gradient's norm."""
    torch.set_num_threads(1)
    began: list[float] = []
    collect_groups = rl.collect_groups

    def begin(*arguments: Any) -> Any:
        began.append(time.process_time())
        return collect_groups(*arguments)

    rl.collect_groups = begin
    callbacks.time = SimpleNamespace(perf_counter=time.process_time)
    check, check_seconds = learner.check_shared_prefix, []

    def check_timed(*arguments: Any, **options: Any) -> Any:
        start = time.process_time()
        compared = check(*arguments, **options)
        check_seconds.append(time.process_time() - start)
        return compared

    learner.check_shared_prefix = check_timed
    recorder = StepRecorder()
    mmrl.train(mmrl_config(folder, sizes), callbacks=[recorder])
    step = recorder.step
    seconds = {part: step["seconds"][f"time/{part}_s"] for part in ("rollout", "learn")}
    seconds["whole"] = step["ended"] - began[0]
    for part in ("learn", "whole"):
        seconds[part] -= check_seconds[0]
    print(f"  mmrl's check of the shared prefix, once a run: {check_seconds[0]:.2f} s", flush=True)
    return {"seconds": seconds, "rollouts": step["rollouts"], "grad_norm": step["grad_norm"]}


class ForcedTokens(LogitsProcessor):
    """Masks all tokens but those that our side drew; a row that has ended gets any token."""

    def __init__(self, tokens_RT: torch.Tensor) -> None:
        self._tokens_RT, self._place = tokens_RT, 0

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        """Return logits [R, V] with one finite number a row."""
        tokens_R1 = self._tokens_RT[:, self._place, None]
        self._place += 1
        return torch.full_like(scores, -torch.inf).scatter_(-1, tokens_R1, 0.0)


def run_trl(folder: Path, sizes: Sizes, rollouts: Mapping[str, list[Any]]) -> dict[str, Any]:
    """Take TRL's step with our tokens and rewards; return its seconds by part and its gradient's norm."""
    from datasets import Dataset
    from transformers import AutoProcessor
    from trl import GRPOConfig, GRPOTrainer

    torch.set_num_threads(1)
    settings = {
        "per_device_train_batch_size": GROUP_SIZE,
        "gradient_accumulation_steps": NUM_PROMPTS,
        "num_generations": GROUP_SIZE,
        "max_completion_length": sizes["completion"],
        "max_steps": 1,
        "beta": KL_COEF,
        "use_bias_correction_kl": False,
        "gradient_checkpointing": False,
        "lr_scheduler_type": "constant",
        "adam_beta2": 0.95,  # ours
        "shuffle_dataset": False,
        "logging_steps": 1,
        "save_strategy": "no",
        "bf16": False,
        "use_cpu": True,
    }
    rows = [json.loads(line) for line in (folder / "rows.jsonl").read_text().splitlines()]
    drawn = [rollout for row in rows for rollout in rollouts[row["id"]]]
    reward_of = {tuple(ids): total for ids, total in drawn}
    tokens_RT = torch.zeros(len(drawn), sizes["completion"], dtype=torch.int64)
    for row, (ids, _) in enumerate(drawn):
        tokens_RT[row, : len(ids)] = torch.tensor(ids)
    asked = []
    for row in rows:
        picture = Image.open(folder / row["image"]).convert("RGB")
        asked.append({"prompt": [{"role": "user", "content": row["question"]}], "image": picture})

    def rewarded(completion_ids: list[list[int]], **_: Any) -> list[float]:
        # A KeyError here would mean that it drew other tokens.
        return [reward_of[tuple(ids)] for ids in completion_ids]

    with hide_progress_bars():
        model = FAMILIES[MODEL.family].model_class.from_pretrained(folder / "model", dtype=torch.float32)
    trainer = GRPOTrainer(
        model=model,
        reward_funcs=rewarded,
        args=GRPOConfig(output_dir=str(folder / "trl"), report_to="none", disable_tqdm=True, **settings),
        train_dataset=Dataset.from_list(asked),
        processing_class=AutoProcessor.from_pretrained(folder / "model"),
    )
    generate = trainer.model.generate
    forced = LogitsProcessorList([ForcedTokens(tokens_RT)])
    trainer.model.generate = lambda **options: generate(**options, logits_processor=forced)
    seconds: Counter[str] = Counter()
    count_seconds(trainer, "_generate", seconds)
    count_seconds(trainer, "_generate_and_score_completions", seconds)
    count_seconds(trainer, "_get_per_token_logps_and_entropies", seconds, within="_generate_and_score_completions")
    began: list[float] = []
    get_batch_samples = trainer.get_batch_samples

    def begin(*arguments: Any, **options: Any) -> Any:
        began.append(time.process_time())
        return get_batch_samples(*arguments, **options)

    trainer.get_batch_samples = begin
    ended: list[float] = []
    on_step_end = trainer.callback_handler.on_step_end

    def end(*arguments: Any, **options: Any) -> Any:
        ended.append(time.process_time())
        return on_step_end(*arguments, **options)

    trainer.callback_handler.on_step_end = end
    trainer.train()
    whole = ended[0] - began[0]
    # Log-probs of the reference are learning; preparing prompts, scoring and advantages are the rest.
    rest = seconds["_generate_and_score_completions"] - seconds["_generate"]
    rest -= seconds["_get_per_token_logps_and_entropies"]
    parts = {"rollout": seconds["_generate"], "learn": whole - seconds["_generate"] - rest, "whole": whole}
    norms = [entry["grad_norm"] for entry in trainer.state.log_history if "grad_norm" in entry]
    return {"seconds": parts, "grad_norm": float(norms[0])}


def count_seconds(trainer: Any, name: str, seconds: Counter[str], within: str | None = None) -> None:
    """Add the CPU seconds of a method's calls to `seconds`; with `within`, only while that method runs."""
    method: Callable[..., Any] = getattr(trainer, name)

    @wraps(method)
    def timed(*arguments: Any, **options: Any) -> Any:
        if within and not trainer.__dict__.get("_runs_" + within):
            return method(*arguments, **options)
        start = time.process_time()
        trainer.__dict__["_runs_" + name] = True
        returned = method(*arguments, **options)
        trainer.__dict__["_runs_" + name] = False
        seconds[name] += time.process_time() - start
        return returned

    setattr(trainer, name, timed)


def run_alone(task: Callable[..., Any], *arguments: Any) -> Any:
    """Run a task in a separate process."""
    with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as process:
        return process.submit(task, *arguments).result()


def run_pair(sizes: Sizes) -> dict[str, dict[str, float]]:
    """Return the CPU seconds of one step by side and part."""
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        run_alone(write_inputs, folder, sizes)
        ours = run_alone(run_mmrl, folder, sizes)
        theirs = run_alone(run_trl, folder, sizes, ours["rollouts"])
    difference = abs(ours["grad_norm"] / theirs["grad_norm"] - 1.0)
    print(f"norm of the gradient: TRL {theirs['grad_norm']:.5f}, mmrl {ours['grad_norm']:.5f}")
    if not difference < TOLERANCE:
        sys.exit(f"no ratio: the two gradients differ by {difference:.1e} of their norm (tolerance {TOLERANCE})")
    pair = {}
    for side, found in (("trl", theirs), ("mmrl", ours)):
        seconds = dict(found["seconds"])
        seconds["rest"] = seconds["whole"] - seconds["rollout"] - seconds["learn"]
        pair[side] = seconds
        print(f"  {side}: " + ", ".join(f"{part} {seconds[part]:.2f} s" for part in (*PARTS, "whole")), flush=True)
    pair["grad_norm"] = {"trl": theirs["grad_norm"], "mmrl": ours["grad_norm"]}
    return pair


def main() -> None:
    """Measure in pairs; print the seconds of each part, and the ratio of whole steps."""
    parser: argparse.ArgumentParser = make_parser(__doc__)
    parser.add_argument("--pairs", type=int, default=3)
    parser.add_argument("--small", action="store_true", help="a prompt of 40 tokens and responses of 8")
    options = parser.parse_args()
    if find_spec("trl") is None:
        sys.exit("this benchmark needs TRL: pip install trl")
    pairs = [run_pair(SMALL if options.small else FULL) for _ in range(options.pairs)]
    for part in (*PARTS, "whole"):
        seconds = {side: [pair[side][part] for pair in pairs] for side in ("trl", "mmrl")}
        print(f"{part}: TRL {median(seconds['trl']):.2f} s, mmrl {median(seconds['mmrl']):.2f} s")
    ratios = [pair["trl"]["whole"] / pair["mmrl"]["whole"] for pair in pairs]
    print(f"whole step, TRL / mmrl: {format_spread(ratios)} (target {TARGET})")
    write_results(options.json, "run_vs_trl", {"ratio": median(ratios), "ratios": ratios, "pairs": pairs})
    if median(ratios) < TARGET:
        sys.exit(1)


if __name__ == "__main__":
    main()
