"""Three rewards of a user, each trained with to the end of a run of mmrl, and in a step of TRL's GRPOTrainer."""

import json
from pathlib import Path

import pytest
import torch
from datasets import Dataset
from harness import TINY, experiment, metrics, rl_stage, run_mmrl, succeed, write
from PIL import Image
from serving import reply, served
from transformers import LogitsProcessor, LogitsProcessorList

from mmrl.config.schema import FromScratchConfig
from mmrl.policy.tiny_models import make_model, make_processor, train_tokenizer
from mmrl_rewards.adapters import TrlReward

pytestmark = pytest.mark.slow

REWARDS = Path(__file__).parent / "user_rewards"
SERVICE = f"{Path(__file__).parents[2]}/examples/service_reward.py:served"
COLOURS = {"red": (200, 30, 30), "green": (30, 200, 30), "blue": (30, 30, 200)}
ASK = {"objects": "Which objects do you see?", "caption": "Describe the picture.", "colour": "Which colour is it?"}
ANSWERS = {"objects": '["cat", "cup"]', "caption": "a plain picture", "colour": None}


def score_by_length(handler, body):
    reply(handler, {"score": min(1.0, len(body["answer"]) / 20)})


def make_rows(folder: Path) -> list[dict]:
    """Return three rows of each task; each has its own picture."""
    rows = []
    for task, question in ASK.items():
        for name, colour in COLOURS.items():
            path = folder / f"{task}_{name}.png"
            Image.new("RGB", (32, 32), colour).save(path)
            row = {"id": path.stem, "picture": path.name, "question": question, "answer": ANSWERS[task] or name}
            rows.append({**row, "task": task})
    return rows


def terms(url: str) -> list[dict]:
    service = {"url": url, "retries": 0, "timeout_s": 10.0}
    return [
        {"fn": f"{REWARDS}/sets.py:objects", "args": {"synonyms": {"mug": "cup"}}, "when": {"task": ["objects"]}},
        {"fn": SERVICE, "args": {"service": service}, "when": {"task": ["caption"]}},
        {"fn": f"{REWARDS}/pixels.py:dominant_colour", "when": {"task": ["colour"]}},
        {"fn": "mmrl_rewards.format:tags", "weight": 0.1},
    ]


def source(folder: Path, rows: list[dict], task: str, answer_type: str) -> dict:
    (folder / f"{task}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows if row["task"] == task))
    columns = {"id": "id", "images": "picture", "question": "question", "answer": "answer"}
    args = {"path": f"{task}.jsonl", "columns": columns, "answer_type": answer_type, "task": task}
    return {"fn": "mmrl_datasets.readers.table:rows", "args": args}


@pytest.mark.parametrize("path", [REWARDS / "sets.py", REWARDS / "pixels.py", Path(SERVICE.partition(":")[0])])
def test_a_users_reward_has_few_lines(path):
    assert len(path.read_text().splitlines()) < 30


def test_mmrl_trains_with_them_to_the_end(tmp_path):
    rows = make_rows(tmp_path)
    types = {"objects": "list", "caption": "text", "colour": "text"}
    sources = [source(tmp_path, rows, task, answer_type) for task, answer_type in types.items()]
    with served(score_by_length) as (url, requests):
        data, stages = {"train": sources, "media_roots": ["."]}, [rl_stage(steps=3, prompts_per_step=3)]
        config = experiment(tmp_path / "run", data=data, rewards={"terms": terms(url)}, stages=stages)
        succeed(run_mmrl("train", write(config, tmp_path / "config.json")))
    steps = [row for row in metrics(tmp_path / "run") if "reward/mean" in row]
    assert len(steps) == 3
    seen = {key for row in steps for key in row if key.startswith("reward/term/")}
    assert {"reward/term/objects", "reward/term/served", "reward/term/dominant_colour"} <= seen
    assert requests


class ForcedTokens(LogitsProcessor):
    """Makes a row write the next of its tokens [rows, length], whatever the model would."""

    def __init__(self, token_ids: torch.Tensor) -> None:
        self._token_ids, self._place = token_ids, 0

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        self._place += 1
        return torch.full_like(scores, -torch.inf).scatter_(-1, self._token_ids[:, self._place - 1, None], 0.0)


def test_trl_takes_steps_with_them(tmp_path):
    trl = pytest.importorskip("trl")
    spec = FromScratchConfig.model_validate(TINY)
    tokenizer = train_tokenizer(["What do you see? <answer>red</answer>"], spec.language.vocab_size)
    # TRL asks for this, and pads the token types of a processor that it is given on the tokenizer's side.
    tokenizer.padding_side = "left"
    rows = []
    for row in make_rows(tmp_path):
        prompt = [{"role": "user", "content": ASK[row["task"]]}]
        answers = {task: row["answer"] if row["task"] == task else None for task in ASK}
        rows.append({"prompt": prompt, "image": Image.open(tmp_path / row["picture"]), **answers})
    settings = {"per_device_train_batch_size": 6, "num_generations": 2, "max_completion_length": 40, "max_steps": 3}
    quiet = {"report_to": "none", "save_strategy": "no", "logging_steps": 1, "bf16": False, "use_cpu": True}
    with served(score_by_length) as (url, requests):
        rewards = [
            TrlReward(f"{REWARDS}/sets.py:objects", synonyms={"mug": "cup"}, target="objects"),
            TrlReward(SERVICE, service={"url": url, "retries": 0}, target="caption"),
            TrlReward(f"{REWARDS}/pixels.py:dominant_colour", target="colour"),
            TrlReward("format:tags", target="colour"),
        ]
        model = make_model(spec, tokenizer, seed=0)
        trainer = trl.GRPOTrainer(
            model=model,
            reward_funcs=rewards,
            args=trl.GRPOConfig(output_dir=str(tmp_path / "trl"), disable_tqdm=True, **settings, **quiet),
            train_dataset=Dataset.from_list(rows),
            processing_class=make_processor(spec, tokenizer, (1024, 1024)),
        )
        # The first response of each pair names the objects, the second one a colour.
        texts = ['<answer>["cat", "mug"]</answer><|im_end|>', "<answer>red</answer><|im_end|>"] * 3
        token_ids = tokenizer(
            texts, padding="max_length", max_length=40, padding_side="right", return_tensors="pt"
        ).input_ids
        generate = trainer.model.generate

        def generate_forced(**options):
            return generate(**options, logits_processor=LogitsProcessorList([ForcedTokens(token_ids)]))

        trainer.model.generate = generate_forced
        before = {name: weight.detach().clone() for name, weight in model.named_parameters()}
        trainer.train()
    assert trainer.state.global_step == 3
    assert any(not weight.equal(before[name]) for name, weight in model.named_parameters())
    log = [entry for entry in trainer.state.log_history if "loss" in entry]
    means = {name: [entry[f"rewards/{name}/mean"] for entry in log] for name in ("objects", "served", "format")}
    # A step without a row of a task has no mean of its reward.
    assert {mean for mean in means["objects"] if mean is not None} == {0.5}
    assert [mean for mean in means["served"] if mean is not None] == pytest.approx([(14 + 3) / 2 / 20] * 3)
    assert means["format"] == [1.0] * 3
    assert {body["answer"] for body, _ in requests} == {'["cat", "mug"]', "red"}
    colours = [entry["rewards/dominant_colour/mean"] for entry in log]
    assert any(mean for mean in colours)
    # Nine rows of three tasks were seen twice each: two rows of three are not of a reward's task.
    assert [reward.num_unscorable for reward in rewards] == [12, 12, 12, 0]
    assert sum(entry["unscorable/objects"] for entry in log) == 12
