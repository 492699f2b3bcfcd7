"""`mmrl plan`: parameters are those that are published, and work and memory are those that are measured on this CPU."""

import json
import re
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from config_samples import SMALL
from tool_modules import load_tool
from torch.utils.flop_counter import FlopCounterMode

from mmrl.cli.main import main
from mmrl.config import load_config
from mmrl.config.recipes import read_header
from mmrl.config.schema import ModelConfig
from mmrl.data.context import make_dataset_context
from mmrl.data.rows import read_filtered_source
from mmrl.media.cache import MediaCache
from mmrl.plan import measure as measuring
from mmrl.plan import stage_plan
from mmrl.plan.measure import Measurement, make_batch, make_policy, measure, visible_pairs
from mmrl.plan.memory import fits, memory_parts, phase_gigabytes
from mmrl.plan.report import find_remedy, yaml_lines
from mmrl.plan.shapes import read_shapes, shipped_models
from mmrl.plan.stage_plan import find_gpu, make_plan
from mmrl.plan.step_time import HF_LAYER_S, learning_flops, step_seconds, step_tokens
from mmrl.plan.workload import MicroBatchSizes, Workload, estimate_workload
from mmrl.policy.build import build_encoder, build_processor
from mmrl.policy.processor import PromptProcessor
from mmrl.types import UserError

ROOT = Path(__file__).parents[3]
QUICKSTART = ROOT / "configs" / "quickstart.yaml"
# Those that are planned soonest: for hardware, without and with experts, and a system's.
# `tools/dev/recipe_memory.py` writes all.
RECIPES = ["qwen2_5_vl_7b_8x80gb", "qwen3_vl_30b_a3b_8x80gb", "clip_reward"]
# Without those that cannot be planned: they go on from the model of another run.
SYSTEMS = sorted(
    path
    for path in ROOT.glob("configs/recipes/*.yaml")
    if "# Hardware:" in path.read_text(encoding="utf-8") and path.stem not in ("ui_r1_e_fast", "vl_cogito_hard")
)

# `safetensors.total` of each model on huggingface.co, or, for Qwen3.5, the presets of keras-team/keras-hub.
PUBLISHED_PARAMETERS = {
    "qwen2-vl-2b": 2_208_985_600,
    "qwen2-vl-7b": 8_291_375_616,
    "qwen2.5-vl-3b": 3_754_622_976,
    "qwen2.5-vl-7b": 8_292_166_656,
    "qwen2.5-vl-32b": 33_452_718_336,
    "qwen2.5-vl-72b": 73_410_777_344,
    "qwen3-vl-2b": 2_127_532_032,
    "qwen3-vl-4b": 4_437_815_808,
    "qwen3-vl-8b": 8_767_123_696,
    "qwen3-vl-32b": 33_357_390_064,
    "qwen3-vl-30b-a3b": 31_070_754_032,
    "qwen3-vl-235b-a22b": 235_670_022_896,
    "qwen3.5-0.8b": 852_985_920,
    "qwen3.5-2b": 2_213_241_664,
    "qwen3.5-4b": 4_539_265_536,
    "qwen3.5-9b": 9_409_813_744,
    "qwen3.5-27b": 27_356_728_560,
    "qwen3.5-35b-a3b": 35_107_181_936,
    "qwen3.5-397b-a17b": 396_802_360_816,
}
WORKLOAD = Workload(
    prompt_tokens=80, grids=((1, 8, 8),), mean_prompt_frac=1.0, longest_response=32, mean_response=32, notes=()
)


@pytest.fixture(autouse=True)
def needs_a_pretended_device():
    try:
        with measuring.pretend_device():
            pass
    except UserError as error:
        pytest.skip(str(error))


def plan_small(*overrides, gpus=1, kind="rl"):
    config = load_config(QUICKSTART, overrides).config
    stage = next(stage for stage in config.stages if stage.kind == kind)
    return make_plan(config, stage, WORKLOAD, find_gpu("h100-80gb"), gpus, 0.3)


def count_with(measure, monkeypatch):
    """Let plans take what a micro-batch needs from a function, in place of a run on the pretended device."""
    monkeypatch.setattr(stage_plan, "measure", measure)
    monkeypatch.setattr(stage_plan, "_measured", {})


def measure_by_tokens(model, options, micro_batch):
    """Say that each token of a micro-batch takes 10 MB, and 1 TFLOP in each direction."""
    flops = {("language", name): 1e12 * micro_batch.num_tokens for name in ("forward", "backward")}
    return Measurement(flops=flops, peak={"language": 1e7 * micro_batch.num_tokens})


def test_a_ladder_measures_only_what_may_fit_and_nothing_twice(monkeypatch):
    measured = []

    def count(model, options, micro_batch):
        measured.append(options)
        return Measurement(flops={}, peak={"language": 1e9})

    count_with(count, monkeypatch)
    plan = plan_small()
    # Libraries alone take more than a gigabyte.
    assert not fits(replace(plan, gpu=plan.gpu._replace(memory_gb=1.0))) and not measured
    assert fits(plan) and fits(plan_small("deepspeed={zero_stage: 3}", gpus=4)) and len(measured) == 1
    assert fits(plan_small("model.lora={rank: 4}")) and len(measured) == 2


def sizes_of(plan):
    return {part.name: part.gigabytes for part in memory_parts(plan)}


def test_parameters_of_shipped_models_are_the_published_ones():
    assert shipped_models() == sorted(PUBLISHED_PARAMETERS)
    for name, published in PUBLISHED_PARAMETERS.items():
        model = read_shapes(ModelConfig(path=f"Qwen/{name}-Instruct")).build("bfloat16")
        assert sum(parameter.numel() for parameter in model.parameters()) == published, name


CELLS = ["qwen2_5_vl,tiny,full,kept", "qwen3_vl,tiny,LoRA,recomputed", "qwen3_5,tiny,full,recomputed"]


@pytest.mark.slow
@pytest.mark.parametrize("cell", CELLS)
def test_work_and_memory_are_those_that_are_measured(cell):
    numbers = load_tool("bench/plan").compare_cell(cell)
    assert numbers["planned FLOPs"] == pytest.approx(numbers["measured FLOPs"], rel=0.001)
    assert numbers["planned peak"] == pytest.approx(numbers["measured peak"], rel=0.1)


@pytest.mark.slow
@pytest.mark.parametrize("family", ["qwen2_5_vl", "qwen3_vl"])
def test_line_through_two_depths_is_the_whole_model(monkeypatch, family):
    spec = {"family": family, "vision": {"num_layers": 7}, "language": {"num_layers": 7}}
    options = ModelConfig(from_scratch=spec, gradient_checkpointing=("language",))
    micro_batch = MicroBatchSizes(num_groups=2, prompt_tokens=100, grids=((1, 16, 16),), responses=(48, 30))
    extrapolated = measure(read_shapes(options), options, micro_batch)
    monkeypatch.setattr(measuring, "_DEPTHS", (6, 7))
    whole = measure(read_shapes(options), options, micro_batch)
    assert extrapolated.total_flops() == pytest.approx(whole.total_flops(), rel=1e-9)
    assert sum(extrapolated.peak.values()) == pytest.approx(sum(whole.peak.values()), rel=0.01)


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_windows_of_all_blocks_are_counted(monkeypatch, dtype):
    """Of seven blocks three see whole images; in float32 a block attends once for each length of its windows."""
    spec = {"family": "qwen2_5_vl", "vision": {"num_layers": 7}, "language": {"num_layers": 3}}
    options = ModelConfig(from_scratch=spec, dtype=dtype)
    model = read_shapes(options)
    model.config.vision_config.fullatt_block_indexes = [1, 4, 6]
    # A window is 8 x 8 patches, which do not fill this image.
    micro_batch = MicroBatchSizes(num_groups=1, prompt_tokens=100, grids=((1, 12, 20),), responses=(16, 16))
    extrapolated = measure(model, options, micro_batch)
    monkeypatch.setattr(measuring, "_DEPTHS", (6, 7))
    assert extrapolated.flops == pytest.approx(measure(model, options, micro_batch).flops, rel=1e-9)


def test_a_frozen_tower_attends_to_the_image_of_each_group():
    """The policy runs it once for each image, in separate forwards."""
    options = ModelConfig(from_scratch={"family": "qwen2_5_vl"}, freeze=("vision", "projector"))
    counts = []
    for num_groups in (1, 2):
        micro_batch = MicroBatchSizes(num_groups=num_groups, prompt_tokens=20, grids=((1, 4, 8),), responses=(8,))
        counts.append(measure(read_shapes(options), options, micro_batch).flops)
    assert counts[1]["vision", "forward"] == 2 * counts[0]["vision", "forward"]
    assert ("vision", "backward") not in counts[1]


def test_a_recurrent_model_of_few_blocks_is_measured():
    spec = {"family": "qwen3_5", "vision": {"num_layers": 1}, "language": {"num_layers": 2}}
    options = ModelConfig(from_scratch=spec)
    micro_batch = MicroBatchSizes(num_groups=1, prompt_tokens=20, grids=((1, 4, 4),), responses=(8,))
    assert measure(read_shapes(options), options, micro_batch).total_flops() > 0


def test_pairs_that_see_each_other_are_those_of_the_mask():
    # Prompt 0-2, responses 3-4 and 5: each token sees the prompt, and its own response up to itself.
    piece = torch.tensor([0, 0, 0, 1, 1, 2])
    visible = torch.ones(6, 6).tril().bool() & ((piece[:, None] == piece) | (piece == 0))
    assert visible_pairs(3, (2, 1)) == visible.sum()


@pytest.mark.slow
def test_zero_divides_what_its_stage_says():
    alone = sizes_of(plan_small("deepspeed={zero_stage: 3}"))
    divided = sizes_of(plan_small("deepspeed={zero_stage: 3}", gpus=4))
    first = sizes_of(plan_small("deepspeed={zero_stage: 1}", gpus=4))
    for name in ("weights", "gradients", "AdamW's moments"):
        assert divided[name] == pytest.approx(alone[name] / 4)
    assert first["gradients"] == pytest.approx(alone["gradients"])
    assert first["AdamW's moments"] == pytest.approx(alone["AdamW's moments"] / 4)


@pytest.mark.slow
def test_an_update_holds_each_gradient_once():
    for dtype, name in (("float32", "gradients"), ("bfloat16", "gradients in float32")):
        parts = memory_parts(plan_small(f"model.dtype={dtype}"))
        held = [part.name for part in parts if "gradients" in part.name and "updating" in part.phases]
        assert held == [name]


@pytest.mark.slow
def test_the_hf_engine_waits_for_the_host():
    plan = plan_small("rollout.engine=hf")
    least = plan.model.config.text_config.num_hidden_layers * plan.workload.mean_response * HF_LAYER_S
    assert step_seconds(plan)["decoding"] == pytest.approx(least)
    assert step_seconds(plan_small("rollout.engine=vllm"))["decoding"] < least


@pytest.mark.slow
def test_a_reference_is_a_whole_copy_only_where_it_shares_nothing():
    kl, frozen = "stages.rl.loss.kl.coef=0.1", "model.freeze=[vision]"
    weights = plan_small().parameters * 4 / 1e9
    assert "reference" not in sizes_of(plan_small("stages.rl.loss.kl.coef=0"))
    assert "reference" not in sizes_of(plan_small(kl, "model.lora={rank: 4}", "stages.rl.reference.init_from=base"))
    assert sizes_of(plan_small(kl, frozen))["reference"] < weights
    assert sizes_of(plan_small(kl, frozen, "deepspeed={zero_stage: 2}"))["reference"] == pytest.approx(weights)


@pytest.mark.slow
def test_remedy_is_the_first_rung_that_fits_and_can_be_pasted(tmp_path):
    plan, memory_gb, seen = plan_small("stages.rl.micro_batch_tokens=4096", gpus=2), 0.0, []
    plan = replace(plan, gpu=plan.gpu._replace(memory_gb=memory_gb))

    def plan_with(settings):
        seen.append(list(settings))
        changed = plan_small(*(f"{path}={json.dumps(value)}" for path, value in settings.items()), gpus=2)
        return [replace(changed, gpu=changed.gpu._replace(memory_gb=memory_gb))]

    assert find_remedy([plan], plan_with) is None
    rungs = ["gradient_checkpointing", "micro_batch_tokens", "zero_stage", "lora", "offload_optimizer"]
    assert [path.rpartition(".")[2] for path in seen[-1]] == rungs
    memory_gb = 80.0
    assert list(find_remedy([plan], plan_with)) == ["model.gradient_checkpointing"]
    # Pasted into a config, the lines are read as they are meant.
    settings = {"model.gradient_checkpointing": ["vision"], "deepspeed.zero_stage": 3, "model.lora": {"rank": 8}}
    file = tmp_path / "pasted.yaml"
    file.write_text(f"extends: {QUICKSTART}\n" + "\n".join(yaml_lines(settings)))
    pasted = load_config(file).config
    assert pasted.deepspeed.zero_stage == 3
    assert pasted.model.gradient_checkpointing == ("vision",)
    assert pasted.model.lora.rank == 8
    assert list(yaml_lines({"stages.rl.micro_batch_tokens": 64}))[1] == "  - {name: rl, micro_batch_tokens: 64}"


@pytest.mark.slow
@pytest.mark.parametrize("recipe", RECIPES)
def test_recipe_states_the_memory_that_its_command_prints(recipe, monkeypatch):
    monkeypatch.chdir(ROOT)
    path = ROOT / "configs" / "recipes" / f"{recipe}.yaml"
    text = path.read_text(encoding="utf-8")
    assert "`mmrl plan " in text and "GB" in text
    assert load_tool("dev/recipe_memory").update_memory(path) == text


@pytest.mark.parametrize("path", SYSTEMS, ids=lambda path: path.stem)
def test_recipe_of_a_system_says_which_plan_its_memory_is_of(path):
    header = read_header(path)
    stated = re.fullmatch(
        rf"\d+ GB of a GPU while \w+(, more than 80 GB)? \(`mmrl plan {path.stem} --gpus (\d+)( [^`]*)?`\)\.",
        header.sections["Memory"],
    )
    assert stated and header.sections["Hardware"].startswith(f"{stated[2]} GPU")
    load_config(path, (stated[3] or "").split())


def test_what_is_unknown_is_refused_with_what_is_known(tmp_path):
    with pytest.raises(UserError, match="shapes come with mmrl"):
        read_shapes(ModelConfig(path="Qwen/Qwen9-VL-3B"))
    tuned = read_shapes(ModelConfig(path="somebody/Mine-Qwen2.5-VL-3B-SFT"))
    assert tuned.config.text_config.hidden_size == 2048 and "has the shapes of qwen2.5-vl-3b" in tuned.note
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "llama"}))
    with pytest.raises(UserError, match="'llama' model; there are plans for qwen2_vl"):
        read_shapes(ModelConfig(path=str(tmp_path)))
    with pytest.raises(UserError, match="--gpu b300: unknown; known are a100-40gb"):
        find_gpu("b300")


def test_a_supervised_stage_needs_what_its_demonstrations_need():
    tool = load_tool("bench/plan")
    sizes = ("stages.cold.prompts_per_step=6", "stages.cold.micro_batch_groups=2", "model.gradient_checkpointing=[]")
    plan = plan_small(*sizes, kind="sft")
    policy = make_policy(plan.model, plan.options, "cpu")
    for parameter in policy.trainable.values():
        parameter.grad = torch.zeros_like(parameter)

    def run(num_groups):
        batch = make_batch(plan.model, plan.micro_batch._replace(num_groups=num_groups))
        policy.compute_logprobs(batch).logprobs_N.sum().backward()

    with FlopCounterMode(display=False, custom_mapping=tool.CPU_ATTENTION) as counter:
        run(1)
    # Each of the six has a prompt of its own, and is learned once.
    assert learning_flops(plan) == pytest.approx(6 * counter.get_total_flops(), rel=0.001)
    assert sum(plan.measurement.peak.values()) == pytest.approx(tool.peak_bytes(lambda: run(2)), rel=0.1)
    assert step_tokens(plan) == 6 * (WORKLOAD.prompt_tokens + WORKLOAD.mean_response)
    assert {name for name, seconds in step_seconds(plan).items() if seconds} == {"learning", "update"}
    assert set(phase_gigabytes(plan)) == {"learning", "updating", "serving"}
    vllm = plan_small("rollout.engine=vllm", "stages.rl.loss.kl.coef=0.1", kind="sft")
    assert not [name for name in sizes_of(vllm) if "vLLM" in name or "keys" in name or name == "reference"]


def test_a_group_is_not_divided_among_gpus(monkeypatch):
    count_with(measure_by_tokens, monkeypatch)
    three = ("stages.rl.prompts_per_step=3", "stages.rl.micro_batch_tokens=100000")
    few, many = plan_small(*three, gpus=2), plan_small(*three, gpus=8)
    assert (few.micro_batch.num_groups, many.micro_batch.num_groups) == (2, 1)
    # One of two GPUs learns from two groups, and of eight GPUs five wait.
    assert step_seconds(few)["learning"] == pytest.approx(2 * step_seconds(many)["learning"])
    assert plan_small(*three, "stages.rl.num_mini_batches=3").micro_batch.num_groups == 1


def test_demonstrations_are_as_long_as_those_that_are_learned(tmp_path):
    texts = ["three", "There are three red squares, and <b>one</b> circle.", "eleven"]
    rows = [{"id": i, "question": "How many?", "answer": text, "response": text} for i, text in enumerate(texts)]
    (tmp_path / "rows.jsonl").write_text("\n".join(map(json.dumps, rows)))
    file = tmp_path / "config.yaml"
    file.write_text(SMALL)
    columns = {name: name for name in rows[0]}
    args = {"path": "rows.jsonl", "answer_type": "text", "columns": columns}
    source = {"fn": "mmrl_datasets.readers.table:rows", "args": args}
    overrides = [f"data.train={json.dumps([source])}", "stages.cold.target_field=response"]
    config = load_config(file, overrides).config
    cold, rl = config.stages
    model = read_shapes(config.model)
    found = estimate_workload(config, cold, tmp_path, model, mean_response=None)

    context = make_dataset_context(config, tmp_path, tmp_path)
    samples = list(read_filtered_source(config.data.train[0], tmp_path, context, "train"))
    bundle = build_processor(config, samples, tmp_path)
    cache = MediaCache(context.media_policy, config.data.media_limits, max_bytes=0)
    processor = PromptProcessor(build_encoder(config, bundle, cache))
    lengths = []
    for sample in samples:
        rollout = processor.build_demonstration(processor.build(sample), sample.response)
        lengths.append(sum(len(segment.token_ids) for segment in rollout.segments))
    assert (found.longest_response, found.mean_response) == (max(lengths), round(sum(lengths) / 3))
    assert len(set(lengths)) > 1 and not any("assumed" in note for note in found.notes)
    # What the policy generates is not in the data.
    assert estimate_workload(config, rl, tmp_path, model, mean_response=7).mean_response == 7
    # Without a tokenizer, a token is three characters.
    named = load_config(file, [*overrides, "model={path: Qwen/Qwen2.5-VL-3B-Instruct}"]).config
    assert estimate_workload(named, cold, tmp_path, model, mean_response=None).longest_response == 17


def test_unwritten_demonstrations_are_as_long_as_what_the_run_may_generate(tmp_path):
    config = load_config(QUICKSTART, ["stages.rl.sampling.max_new_tokens=77"]).config
    cold = config.stages[0].model_copy(update={"target_field": "expert"})
    found = estimate_workload(config, cold, QUICKSTART.parent, read_shapes(config.model), mean_response=None)
    assert found.longest_response == found.mean_response == 77
    assert "assumed: a demonstration has at most 77 tokens" in "\n".join(found.notes)


def test_a_video_is_assumed_where_the_config_describes_videos(tmp_path):
    video = {"max_frames": 8, "min_pixels": 3136, "max_pixels": 12544}
    model = {"path": "Qwen/Qwen2.5-VL-3B-Instruct", "video": video}
    config = load_config(QUICKSTART, [f"model={json.dumps(model)}", "data.train=[{fn: ./missing.py:rows}]"]).config
    shapes = read_shapes(config.model)
    # Frames of 112 x 112 pixels have 8 x 8 patches, and a token covers four patches of two frames.
    assert estimate_workload(config, config.stages[0], tmp_path, shapes, None).grids == ((4, 8, 8),)
    limited = config.model_copy(update={"model": config.model.model_copy(update={"max_prompt_tokens": 256 + 32})})
    assert estimate_workload(limited, config.stages[0], tmp_path, shapes, None).grids == ((2, 8, 8),)


@pytest.mark.slow
def test_every_stage_that_trains_is_planned(monkeypatch, capsys):
    count_with(measure_by_tokens, monkeypatch)
    command = ["plan", str(QUICKSTART), "stages.cold.micro_batch_groups=1", "stages.rl.steps=20"]
    assert main([*command, "--json"]) == 0
    planned = json.loads(capsys.readouterr().out)
    assert list(planned["stages"]) == ["cold", "rl"] and planned["stage"] == "rl" and planned["fits"]
    assert planned["phase_gb"] == planned["stages"]["rl"]["phase_gb"]
    assert planned["stages"]["rl"]["hours"] == pytest.approx(sum(planned["step_seconds"].values()) * 20 / 3600)
    assert main(command) == 0
    printed = capsys.readouterr().out
    assert re.search(r"cold \(sft\).*\n  rl \(rl\).*\n  in all .* GPU-hours\n\nStage rl, which needs the most", printed)
    assert main([*command, "--stage", "cold"]) == 0
    printed = capsys.readouterr().out
    assert "Stages that train" not in printed and "while generating" not in printed
    assert main([*command, "--stage", "warm"]) == 2
    assert "no stage 'warm' trains; the stages that train: cold, rl" in capsys.readouterr().err


def test_settings_are_found_with_which_all_stages_fit(monkeypatch, capsys):
    count_with(measure_by_tokens, monkeypatch)
    sizes = ["stages.cold.micro_batch_groups=1000", "stages.cold.prompts_per_step=1000"]
    # As many demonstrations as fit into 16,384 tokens share a forward pass, of 10 MB a token.
    assert main(["plan", str(QUICKSTART), "--json", *sizes]) == 1
    planned = json.loads(capsys.readouterr().out)
    assert not planned["stages"]["cold"]["fits"] and planned["stages"]["rl"]["fits"]
    assert {path for path in planned["remedy"] if "micro_batch" in path} == {"stages.cold.micro_batch_tokens"}
    overrides = [f"{path}={json.dumps(value)}" for path, value in planned["remedy"].items()]
    assert main(["plan", str(QUICKSTART), *sizes, *overrides]) == 0


def test_a_smaller_micro_batch_is_smaller():
    plan = plan_small("stages.rl.micro_batch_groups=1", "stages.rl.micro_batch_tokens=16384")
    plan = replace(plan, gpu=plan.gpu._replace(memory_gb=1.0))
    rungs = []
    find_remedy([plan], lambda settings: rungs.append(dict(settings)) or [plan])
    limits = [rung["stages.rl.micro_batch_tokens"] for rung in rungs if "stages.rl.micro_batch_tokens" in rung]
    assert limits and limits[0] < plan.micro_batch.num_tokens


def test_the_ladder_has_no_adapter_where_a_stage_names_components():
    rate = "stages.rl.optimizer.lr_by_component={vision: 1e-6}"
    for override in (rate, "stages.rl.freeze=[vision]"):
        plan = plan_small(override, "stages.rl.loss.kl.coef=0")
        plan = replace(plan, gpu=plan.gpu._replace(memory_gb=0.0))
        rungs = []

        def plan_with(settings, override=override, plan=plan, rungs=rungs):
            rungs.append(dict(settings))
            load_config(QUICKSTART, [override, *(f"{path}={json.dumps(value)}" for path, value in settings.items())])
            return [plan]

        assert find_remedy([plan], plan_with) is None
        assert "model.lora" not in rungs[-1] and "deepspeed.offload_optimizer" in rungs[-1]


def test_command_says_what_it_assumed_without_data(tmp_path, capsys):
    file = tmp_path / "config.yaml"
    file.write_text(SMALL)
    assert main(["plan", str(file)]) == 0
    printed = capsys.readouterr().out
    assert "data.train cannot be used" in printed
    assert "assumed: a prompt of 256 tokens of text and one image" in printed
    assert "with vision, language recomputed: " in printed


def test_memory_of_composed_options_is_that_of_their_arithmetic(monkeypatch):
    count_with(measure_by_tokens, monkeypatch)
    half = "model.dtype=bfloat16"

    def sizes(*overrides, **options):
        plan = plan_small(half, *overrides, **options)
        return plan, {part.name: (part.gigabytes * 1e9, part.place, part.phases) for part in memory_parts(plan)}

    zero = "deepspeed={zero_stage: 3, offload_optimizer: true, bucket_elements: 1000}"
    kl, all_phases = "stages.rl.loss.kl.coef=0.1", ("generating", "learning", "updating")
    # An adapter, ZeRO-3, offloading and a reference on four GPUs, which the engine shares.
    plan, parts = sizes("model.lora={rank: 4}", zero, kl, "rollout.engine=vllm", gpus=4)
    assert parts["weights"] == (pytest.approx(2 * (plan.parameters - plan.trained) / 4), "gpu", all_phases)
    assert parts["adapter"][0] == pytest.approx(4 * plan.trained / 4)
    assert parts["gradients"][:2] == (pytest.approx(4 * plan.trained / 4), "host")
    assert parts["AdamW's moments"][:2] == (pytest.approx(8 * plan.trained / 4), "host")
    assert parts["reference"][0] == pytest.approx(2 * plan.parameters)
    # A bucket has its size however few weights are trained.
    assert parts["bucket of gradients"] == (pytest.approx(4 * 1000), "gpu", all_phases)
    assert parts["vLLM: weights"] == (pytest.approx(2 * plan.parameters), "gpu", ("generating",))
    # ZeRO-2 makes its bucket in each backward pass; without offloading, gradients stay on the GPU.
    _, parts = sizes("deepspeed={zero_stage: 2}", gpus=2)
    assert parts["bucket of gradients"][2] == ("learning",) and parts["gradients"][1] == "gpu"
    # The engine hf generates with whole weights.
    plan, parts = sizes(zero, "rollout.engine=hf", gpus=2)
    assert parts["weights gathered"] == (pytest.approx(2 * plan.parameters), "gpu", ("generating",))
    assert "generating" not in parts["layers gathered"][2]
    # Beside the learner it generates with a copy.
    plan, parts = sizes("stages.rl.async_rollouts=true", "model.freeze=[vision]")
    assert parts["copy of trained weights that generates"] == (pytest.approx(2 * plan.trained), "gpu", all_phases)
    assert next(part for name, part in parts.items() if "keys and values" in name)[2] == all_phases
    # DeepSpeed has numbers of what another stage trains; torch frees them.
    frozen = "stages.rl.freeze=[vision, projector]"
    for deepspeed in (zero, "deepspeed=null"):
        plan, parts = sizes(frozen, deepspeed, kl)
        trained = plan.parameters if deepspeed == zero else plan.trained
        assert parts["float32 weights and AdamW's moments"][0] == pytest.approx(12 * trained)
        assert parts["reference"][0] == pytest.approx(2 * plan.parameters)
    # A reference that moves has float32 averages.
    plan, parts = sizes(kl, "model.freeze=[vision, projector]", "stages.rl.reference.update=ema")
    assert parts["reference"][0] == pytest.approx(2 * plan.trained)
    assert parts["reference in float32"][0] == pytest.approx(4 * plan.trained)
    # An adapter that an earlier stage trained is copied, unless the penalty measures from the model below it.
    plan, parts = sizes(kl, "model.lora={rank: 4}")
    assert parts["reference"][0] == pytest.approx(4 * plan.trained)
    assert "reference" not in sizes(kl, "model.lora={rank: 4}", "stages.rl.reference.init_from=base")[1]


def test_a_prompt_is_cached_once_for_its_group_and_an_image_once_for_all_steps(monkeypatch):
    count_with(measure_by_tokens, monkeypatch)
    overrides = ("stages.rl.prompts_per_step=3", "stages.rl.group_size=4", "rollout.engine=hf")
    plan = plan_small(*overrides)
    keys = plan.model.cache_bytes(plan.width)[0]
    assert sizes_of(plan)["keys and values of 12 rows"] * 1e9 == pytest.approx(keys * (3 * 80 + 12 * 32))
    frozen = "model.freeze=[vision, projector]"
    plan = plan_small(*overrides, frozen, "stages.rl.steps=10")
    # 8 x 8 patches are 16 tokens.
    features = 30 * 16 * 4 * plan.model.config.text_config.hidden_size
    assert sizes_of(plan)["features of images that are kept"] * 1e9 == pytest.approx(features)
    many = plan_small(*overrides, frozen, "stages.rl.steps=10000000")
    assert sizes_of(many)["features of images that are kept"] * 1e9 == 2**30
    # Under ZeRO-3 each rank runs the tower each time.
    assert "features of images that are kept" not in sizes_of(
        plan_small(*overrides, frozen, "deepspeed={zero_stage: 3}")
    )


def test_without_a_shared_prefix_each_response_has_its_own_prompt(monkeypatch):
    count_with(measure_by_tokens, monkeypatch)
    sizes = ("stages.rl.group_size=4", "stages.rl.prompts_per_step=3", "stages.rl.micro_batch_tokens=1120")
    shared, single = plan_small(*sizes), plan_small(*sizes, "stages.rl.shared_prefix=off")
    assert (shared.micro_batch.num_groups, shared.micro_batch.responses) == (3, (32,) * 4)
    assert (single.micro_batch.num_groups, single.micro_batch.responses) == (10, (32,))
    # `measure_by_tokens`: 1 TFLOP a token, forward and backward.
    assert learning_flops(shared) == pytest.approx(2e12 * 3 * (80 + 4 * 32))
    assert learning_flops(single) == pytest.approx(2e12 * 3 * 4 * (80 + 32))


def test_time_of_composed_options_is_that_of_their_arithmetic(monkeypatch):
    count_with(measure_by_tokens, monkeypatch)
    rounds = ("stages.rl.prompts_per_step=8", "stages.rl.num_mini_batches=4", "stages.rl.ppo_epochs=2")
    once, plan = step_seconds(plan_small(rounds[0])), plan_small(*rounds)
    # Each mini-batch of each epoch ends with an update.
    assert step_seconds(plan)["update"] == pytest.approx(8 * once["update"])
    assert step_seconds(plan)["old log-probs"] == 0
    forward = step_seconds(plan)["learning"] / 4
    for override in ("loss.old_logprobs=recomputed", "loss.kl={coef: 0.1, apply_to: reward}"):
        seconds = step_seconds(plan_small(*rounds, f"stages.rl.{override}"))
        # Of all mini-batches but the first, before any update.
        assert seconds["old log-probs"] == pytest.approx(3 / 4 * forward)
    servers = ("rollout.engine=vllm_server", "stages.rl.sampling.max_new_tokens=32")
    waiting = step_seconds(plan_small(*servers, gpus=2))
    overlapping = step_seconds(plan_small(*servers, "stages.rl.async_rollouts=true", gpus=2))
    assert sum(overlapping.values()) == pytest.approx(
        max(waiting["prefill"] + waiting["decoding"], waiting["learning"] + waiting["update"])
        + waiting["weights to the engine"]
    )


def test_the_hf_engine_generates_one_batch_after_the_other(monkeypatch):
    # Without arithmetic, a token of a batch takes the time of the host, however many rows there are.
    count_with(lambda model, options, micro_batch: Measurement(flops={}, peak={}), monkeypatch)
    sizes = ("rollout.engine=hf", "stages.rl.group_size=4")
    # A batch holds 2**18 tokens, 2340 rows of 80 + 32 tokens.
    for prompts, batches in ((1, 1), (585, 1), (586, 2), (1171, 3)):
        plan = plan_small(*sizes, f"stages.rl.prompts_per_step={prompts}")
        assert f"keys and values of {min(4 * prompts, 2340)} rows" in sizes_of(plan)
        least = plan.model.config.text_config.num_hidden_layers * plan.workload.mean_response * HF_LAYER_S
        assert step_seconds(plan)["decoding"] == pytest.approx(batches * least)


def test_prompts_in_flight_are_all_prefilled(monkeypatch):
    count_with(measure_by_tokens, monkeypatch)
    steps = "stages.rl.rollout_steps=[{{kind: generate, partial_rollout_tokens: 64, oversampling: {}}}]"
    own, more = (step_seconds(plan_small(steps.format(factor))) for factor in (1, 3))
    assert more["prefill"] == pytest.approx(3 * own["prefill"])


def test_prompts_in_flight_share_the_tokens_that_a_step_decodes(monkeypatch):
    # Without arithmetic, a token takes the time of the host, however many rows there are.
    count_with(lambda model, options, micro_batch: Measurement(flops={}, peak={}), monkeypatch)
    steps = "stages.rl.rollout_steps=[{{kind: generate, partial_rollout_tokens: 8, oversampling: {}}}]"
    own, more = (step_seconds(plan_small("rollout.engine=hf", steps.format(factor))) for factor in (1, 4))
    # A step decodes the tokens of the groups that it completes, four times as many at a time.
    assert more["decoding"] == pytest.approx(own["decoding"] / 4)


def test_servers_that_leave_no_gpu_to_learn_on_are_refused():
    servers = ("rollout.engine=vllm_server", "rollout.server.replicas=2", "rollout.vllm.tensor_parallel_size=2")
    assert plan_small(*servers, gpus=5).learners == 1
    with pytest.raises(UserError, match="--gpus 4: the servers take 4, and none is left to learn on"):
        plan_small(*servers, gpus=4)
