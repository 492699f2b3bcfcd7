"""A chat template that opens the thought, as those of Qwen3.5 do: SFT, rewards, rethinking and benchmarks."""

import json
from pathlib import Path
from typing import Any

import pytest
from harness import TINY, experiment, jsonl, metrics, refuse, rl_stage, rows, sft_stage, succeed, write
from json_lines import read_json_lines

from mmrl.config.schema import FromScratchConfig
from mmrl.policy.tiny_models import make_model, make_processor, train_tokenizer

OPENED, CLOSED = "<think>\n", "<think>\n\n</think>\n\n"
# The end of the generation prompt in the templates of Qwen3.5-4B and larger.
ENDING = (
    "<|im_start|>assistant\n{% if enable_thinking is defined and enable_thinking is false %}"
    f"{CLOSED}{{% else %}}{OPENED}{{% endif %}}"
)
FORM = {"add_instruction": False, "thinking": "required"}
RETHINK = [
    {"kind": "generate"},
    {"kind": "rethink", "correct": ["count"], "fraction": 0.5, "max_new_tokens": 8, "triggers": [{"text": " Wait."}]},
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    """A tiny new Qwen3.5 whose prompts end inside a thought, unless told otherwise."""
    folder = tmp_path_factory.mktemp("thinks")
    spec = FromScratchConfig(**{**TINY, "family": "qwen3_5", "language": {**TINY["language"], "num_layers": 2}})
    texts = [f"How many? <think>\nI see {number}</think><answer>{number}</answer> Wait." for number in range(3)]
    tokenizer = train_tokenizer(texts * 3, spec.language.vocab_size)
    make_model(spec, tokenizer, seed=1).save_pretrained(folder)
    processor = make_processor(spec, tokenizer, (1024, 1024))
    processor.chat_template = processor.chat_template.replace("<|im_start|>assistant\n", ENDING)
    processor.save_pretrained(folder)
    return folder


def config(folder: Path, place: Path, *, thoughts: bool = True, **sections: object) -> dict[str, Any]:
    """A run on twelve counting questions, answered with a thought first."""
    columns = {"thinking": "thought"} if thoughts else {}
    origins = {}
    for split in ("train", "test"):
        asked = rows(12)
        for row in asked:
            row |= {"id": f"{split}-{row['id']}", "thought": f"I see {row['count']}"}
        origins[split] = [jsonl(place, asked, split, **columns)]
    model = {"path": str(folder), "dtype": "float32", "device": "cpu", "min_pixels": 1024, "max_pixels": 1024}
    return experiment(
        place / "run",
        model=model,
        data=origins,
        **{
            "response_format": FORM,
            "evaluation": {"max_new_tokens": 16, "batch_size": 12},
            "logging": {"rollouts": {"every": 1}},
            "stages": [
                sft_stage(steps=30, target_field="target"),
                rl_stage(steps=2, rollout_steps=RETHINK, sampling={"max_new_tokens": 16}),
            ],
            **sections,
        },
    )


@pytest.mark.slow
def test_all_parts_of_a_run_take_a_response_from_inside_its_thought(folder, tmp_path, in_process):
    path = write(config(folder, tmp_path), tmp_path / "thinks.yaml")
    succeed(in_process("train", path))
    # What was imitated begins after the tag, so that responses have the format and the answer is found.
    (task,) = json.loads((tmp_path / "run" / "summary.json").read_text())["tasks"]
    steps = [record for record in metrics(tmp_path / "run") if "rethink/attempted" in record]
    assert steps and sum(record["rethink/attempted"] for record in steps) > 0
    lines = (tmp_path / "run" / "rollouts" / "rl-000001.jsonl").read_text().splitlines()
    texts = [json.loads(line)["response"] for line in lines]
    assert all(text.startswith(OPENED) and text.count("<think>") == 1 for text in texts)
    assert any("</think><answer>" in text for text in texts)
    assert max(record["reward/term/format"] for record in steps) > 0
    # `mmrl eval` marks the same text, and the benchmark's own rules see the thought.
    succeed(in_process("eval", tmp_path / "run", "--benchmark", "run:test", "--out", tmp_path / "out"))
    assert json.loads((tmp_path / "out" / "report.json").read_text())["rewards"] == {"count": task["after"]}
    predictions = read_json_lines(tmp_path / "out" / "predictions.jsonl")
    assert all(prediction["response"].startswith(OPENED) for prediction in predictions)


def test_without_the_thought_the_same_model_answers_at_once(folder, tmp_path, in_process, monkeypatch):
    monkeypatch.chdir(tmp_path)
    stages = [sft_stage(steps=2, target_field="target")]
    answers = {"add_instruction": False}
    settings = config(folder, tmp_path, thoughts=False, stages=stages, response_format=answers)
    settings["model"]["chat"] = {"enable_thinking": False}
    succeed(in_process("train", write(settings, tmp_path / "answers.yaml")))
    succeed(in_process("eval", tmp_path / "run", "--benchmark", "run:test", "--out", tmp_path / "out"))
    predictions = (tmp_path / "out" / "predictions.jsonl").read_text()
    assert not any(json.loads(line)["response"].startswith(OPENED) for line in predictions.splitlines())


@pytest.mark.parametrize(
    ("sections", "why"),
    [
        ({"response_format": {"add_instruction": False}}, "response_format.thinking is none; set model.chat"),
        (
            {
                "response_format": {**FORM, "thinking": "optional"},
                "stages": [sft_stage(steps=1, target_field="target", drop_thinking_prob=0.5)],
            },
            "stage 'cold': drop_thinking_prob leaves out thoughts, and the chat template opens one",
        ),
    ],
)
def test_a_config_that_does_not_fit_the_template_is_refused_before_the_first_step(
    folder, tmp_path, in_process, sections, why
):
    path = write(config(folder, tmp_path, **sections), tmp_path / "bad.yaml")
    done = refuse(in_process("train", path), why)
    assert "cold 1/" not in done.output
    checked = in_process("data", "check", path)
    assert checked.code == 1
    assert why in checked.output
