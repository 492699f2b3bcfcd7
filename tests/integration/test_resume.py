"""A run that was killed, stopped or damaged, and started again, ends with the bytes of an undisturbed run."""

import hashlib
import json
import re
import shutil
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from harness import (
    experiment,
    jsonl,
    metrics,
    moved_parts,
    refuse,
    reproducible_files,
    rl_stage,
    rows,
    run_mmrl,
    scheduled,
    sft_stage,
    shared,
    stop_in_rl,
    succeed,
    write,
)
from PIL import Image

pytestmark = pytest.mark.slow

KILLS = (  # in each process in turn: at the Nth call of a function
    ("mid-imitation", "mmrl.learner.learner:PolicyLearner.step", 5),
    # the first six check the one resumed from
    ("while a checkpoint is written", "mmrl.checkpoint.atomic_folder:file_digest", 6 + 2),
    ("between the stages", "mmrl.training.held_out:HeldOutEvaluation.measure_test_samples", 1),
    ("mid-reinforcement", "mmrl.learner.learner:PolicyLearner.step", 5),
    ("while the model is exported", "transformers.processing_utils:ProcessorMixin.save_pretrained", 1),
)


@pytest.fixture
def own_config(tmp_path) -> Path:
    """The config of the undisturbed run, with another run directory."""
    return write(experiment(tmp_path / "run"), tmp_path / "tiny.yaml")


@pytest.fixture(scope="session")
def stopped(tmp_path_factory) -> Path:
    """A folder with tiny.yaml and its run, stopped by Ctrl-C in the fifth step of reinforcement."""

    def run(folder):
        stop_in_rl(write(experiment(folder / "run"), folder / "tiny.yaml"), 5)

    return shared(tmp_path_factory, "stopped", run)


@pytest.fixture
def stopped_copy(stopped, tmp_path) -> Path:
    """A copy of the stopped run, moved: its run directory."""
    return Path(shutil.copytree(stopped / "run", tmp_path / "moved"))


def test_undisturbed_run_has_stages_rates_and_weights_that_a_wrong_resume_would_change(whole):
    stages = [record["stage"] for record in metrics(whole)]
    rates = [record["learner/lr"] for record in metrics(whole) if record["stage"] == "rl" and "learner/lr" in record]
    assert len(set(rates)) == 8 and rates[0] < rates[1] > rates[7]
    assert 0 < stages.count("cold") < 24  # the gate ended the cold start early
    learned = [record for record in metrics(whole) if "policy/reference_kl_nats" in record]
    assert len(learned) == 8
    assert learned[-1]["policy/reference_kl_nats"] > 1e-3  # reinforcement moved the weights away from the reference


def test_run_killed_again_and_again_equals_the_undisturbed_one(own_config, whole):
    for name, function, nth in KILLS:
        done = run_mmrl("train", own_config, fault=(function, nth, "SIGKILL"))
        assert done.code == -signal.SIGKILL, f"not killed {name}: {done}"
    assert (own_config.parent / "run" / ".model.partial" / "model.safetensors").is_file()  # the last kill hit an export
    succeed(run_mmrl("train", own_config))
    assert reproducible_files(own_config.parent / "run") == reproducible_files(whole)
    assert not [*own_config.parent.rglob("*.partial"), *own_config.parent.rglob("*.tmp")]


def test_run_resumed_after_ctrl_c_equals_the_undisturbed_one(stopped, stopped_copy, whole, in_process):
    assert (stopped_copy / "checkpoints" / "01-000005").is_dir()
    done = succeed(in_process("train", stopped / "tiny.yaml", "--run-dir", stopped_copy))
    assert "01-000005: stage rl, step 5" in done.output
    assert reproducible_files(stopped_copy) == reproducible_files(whole)


TERMS = (  # at the Nth call of a function; what is then saved last
    ("mid-step", "mmrl.learner.learner:PolicyLearner.step", 5, "00-000005"),
    ("while a checkpoint is written", "mmrl.checkpoint.manager:merge_part_hashes", 1, "00-000003"),
    ("between the stages and the end", "mmrl.training.held_out:HeldOutEvaluation.measure_test_samples", 2, "02-000000"),
)


@pytest.mark.parametrize(("function", "nth", "saved"), [term[1:] for term in TERMS], ids=[term[0] for term in TERMS])
def test_run_resumed_after_sigterm_equals_the_undisturbed_one(own_config, whole, in_process, function, nth, saved):
    done = run_mmrl("train", own_config, fault=(function, nth, "SIGTERM"))
    assert done.code == 128 + signal.SIGTERM
    run = own_config.parent / "run"
    assert max(path.name for path in (run / "checkpoints").iterdir()) == saved
    assert in_process("train", own_config).code == 0
    assert reproducible_files(run) == reproducible_files(whole)


def test_run_killed_during_a_write_in_the_background_equals_the_undisturbed_one(own_config, whole, in_process):
    """It resumes with another `checkpoints.every`, which no result depends on."""
    fault = ("mmrl.checkpoint.atomic_folder:file_digest", 6 + 2, "SIGKILL")  # the second checkpoint
    done = run_mmrl("train", own_config, "checkpoints.async_save=true", fault=fault)
    assert done.code == -signal.SIGKILL
    checkpoints = own_config.parent / "run" / "checkpoints"
    assert {path.name for path in checkpoints.iterdir()} == {".00-000006.partial", "00-000003"}
    done = succeed(in_process("train", own_config, "checkpoints.async_save=true", "checkpoints.every=2"))
    assert "This run continues with checkpoints.every: 3 -> 2 (no result depends on it)." in done.output
    assert reproducible_files(own_config.parent / "run") == reproducible_files(whole)


@pytest.mark.parametrize(
    "reference", [{"update": "ema", "ema_decay": 0.5}, {"update": "reset", "update_every": 2, "reset_optimizer": True}]
)
def test_moving_reference_continues_where_it_was(tmp_path, in_process, reference):
    """Stopped in the fourth of five steps, after updates of the reference that a fresh copy would not have."""
    loss = {"kl": {"coef": 0.05}, "entropy": {"coef": 0.1}}  # the bonus moves the weights, whatever is rewarded
    stages = [rl_stage(steps=5, loss=loss, reference=reference, optimizer=scheduled(3e-3, 5))]
    once = write(experiment(tmp_path / "once", stages=stages), tmp_path / "once.yaml")
    twice = write(experiment(tmp_path / "twice", stages=stages), tmp_path / "twice.yaml")
    assert in_process("train", once).code == 0
    stop_in_rl(twice, 4)
    assert in_process("train", twice).code == 0
    assert reproducible_files(tmp_path / "twice") == reproducible_files(tmp_path / "once")
    kls = [record["policy/reference_kl_nats"] for record in metrics(tmp_path / "once") if "learner/lr" in record]
    assert len(kls) == 5 and max(kls) > 1e-4


@pytest.mark.parametrize("reference", [{}, {"update": "ema", "ema_decay": 0.5}])
def test_a_resumed_run_whose_stages_freeze_different_parts_is_byte_equal(tmp_path, in_process, reference):
    """A tower that is trained, then frozen (and its features cached), then trained while the rest is frozen."""
    loss = {"kl": {"coef": 0.05}, "entropy": {"coef": 0.1}}  # the bonus moves the weights, whatever is rewarded
    stages = [sft_stage(steps=3), rl_stage(steps=4, loss=loss, reference=reference, freeze=["vision", "projector"])]
    stages.append(rl_stage(name="tower", steps=3, loss=loss, freeze=["language"]))
    model = {**experiment(tmp_path)["model"], "freeze": ["projector"]}
    saving = {"every": 3, "keep_last": 9}
    for name in ("once", "twice"):
        config = experiment(tmp_path / name, stages=stages, model=model, checkpoints=saving)
        write(config, tmp_path / f"{name}.yaml")
    done = succeed(in_process("train", tmp_path / "once.yaml"))
    # the columns are tensors, parameters, trained ones, type, and the rates of the three stages
    assert [len(line.split()) for line in done.output.splitlines() if line.split()[:1] == ["projector"]] == [6]
    for nth in (3, 3):  # in the second stage; in the third, by the process that continued
        stop_in_rl(tmp_path / "twice.yaml", nth)
    assert "02-000002" in {path.name for path in (tmp_path / "twice" / "checkpoints").iterdir()}
    assert in_process("train", tmp_path / "twice.yaml").code == 0
    assert reproducible_files(tmp_path / "twice") == reproducible_files(tmp_path / "once")

    once = tmp_path / "once"
    assert moved_parts(once, "01-000000", "02-000000") == {"model.language_model"}
    assert moved_parts(once, "02-000000", "03-000000") == {"model.visual"}


@pytest.mark.parametrize(("name", "damage"), [("model.safetensors", "cut"), ("hashes.json", "lost")])
def test_a_damaged_checkpoint_is_warned_of_and_the_one_before_resumed(
    stopped, stopped_copy, whole, in_process, name, damage
):
    file = stopped_copy / "checkpoints" / "01-000005" / name
    if damage == "cut":
        file.write_bytes(file.read_bytes()[:-10])
    else:
        file.unlink()
    done = succeed(in_process("train", stopped / "tiny.yaml", "--run-dir", stopped_copy))
    assert re.search(rf"^warning: checkpoint .*01-000005 is damaged \({name}", done.output, re.MULTILINE)
    assert "01-000003: stage rl, step 3" in done.output
    assert (stopped_copy / "checkpoints" / "damaged" / "01-000005").is_dir()
    assert reproducible_files(stopped_copy) == reproducible_files(whole)


def test_finished_run_that_is_started_again_shows_its_table_and_changes_nothing(own_config, whole, in_process):
    shutil.copytree(whole, own_config.parent / "run")
    before = _everything(whole)
    done = succeed(in_process("train", own_config))
    assert "Held-out reward before stage rl and at the end" in done.output
    assert "count" in done.output
    assert _everything(own_config.parent / "run") == before


def test_a_checkpoint_of_another_config_is_refused_by_key(stopped, stopped_copy, in_process):
    """One that was copied from another run."""
    folder = stopped_copy / "checkpoints" / "01-000005"
    text = (folder / "config.yaml").read_text()
    (folder / "config.yaml").write_text(text.replace("group_size: 4", "group_size: 8"))
    hashes = json.loads((folder / "hashes.json").read_text())
    hashes["config.yaml"] = hashlib.sha256((folder / "config.yaml").read_bytes()).hexdigest()
    (folder / "hashes.json").write_text(json.dumps(hashes))
    done = in_process("train", stopped / "tiny.yaml", "--run-dir", stopped_copy)
    refuse(done, "01-000005 holds the run of another config", "stages.1.group_size: 8 -> 4")


def _everything(run_dir: Path) -> dict[str, bytes]:
    """Every file of a run but the manifest, which says when the run was last begun."""
    files = [path for path in run_dir.rglob("*") if path.is_file() and path.name != "manifest.json"]
    return {str(path.relative_to(run_dir)): path.read_bytes() for path in files}


@pytest.fixture(scope="session")
def table_run(tmp_path_factory) -> Path:
    """A folder with rows.jsonl, held.jsonl, their pictures, and a run on them that was stopped in its third step."""

    def run(folder):
        held_out = [{**row, "id": f"t{row['id']}", "picture": "0.png"} for row in rows(4)]
        data = {"train": [jsonl(folder, rows(8))], "test": [jsonl(folder, held_out, name="held")]}
        config = experiment(folder / "run", data=data, stages=[rl_stage(steps=4, optimizer=scheduled(3e-3, 4))])
        stop_in_rl(write(config, folder / "tiny.yaml"), 3)

    return shared(tmp_path_factory, "table_run", run)


@pytest.fixture
def table_copy(table_run, tmp_path) -> Path:
    """A copy of that folder."""
    return Path(shutil.copytree(table_run, tmp_path / "copy"))


def change_row(file: Path, number: int, **changes: object) -> None:
    lines = file.read_text().splitlines()
    lines[number] = json.dumps(json.loads(lines[number]) | changes)
    file.write_text("\n".join(lines) + "\n")


def reverse_rows(file: Path) -> None:
    file.write_text("".join(reversed(file.read_text().splitlines(keepends=True))))


def _redraw(path: Path) -> None:
    Image.new("RGB", (32, 32), (1, 2, 3)).save(path)


SOURCE, TRAIN, HELD = "(mmrl_datasets.readers.table:rows): sample count/train/", "rows.jsonl", "held.jsonl"
CHANGES: dict[str, tuple[Callable[[Path], None], list[str]]] = {
    "a redrawn picture": (
        lambda folder: _redraw(folder / "3.png"),
        [f"data.train.0 {SOURCE}r3: media 0 (", "3.png) changed", "(1 difference)"],
    ),
    "another answer": (lambda folder: change_row(folder / TRAIN, 2, count=3), [f"{SOURCE}r2: target changed"]),
    "another question": (lambda folder: change_row(folder / TRAIN, 2, question="?"), ["/r2: question changed"]),
    "a lost row and a new one": (
        lambda folder: change_row(folder / TRAIN, 5, id="r9"),
        ["sample count/train/r5 is gone", "sample count/train/r9 is new", "(2 differences)"],
    ),
    "another order": (
        lambda folder: reverse_rows(folder / TRAIN),
        ["data.train: the samples come in another order, from count/train/r7 on"],
    ),
    "a held-out answer": (
        lambda folder: change_row(folder / HELD, 2, count=1),
        [f"data.test.0 {SOURCE}tr2: target changed"],
    ),
}


@pytest.mark.parametrize("name", CHANGES)
def test_run_with_changed_data_is_refused_with_what_changed(table_copy, in_process, name):
    change, named = CHANGES[name]
    change(table_copy)
    run_dir = table_copy / "run"
    before = _everything(run_dir)
    done = refuse(in_process("train", table_copy / "tiny.yaml", "--run-dir", run_dir))
    for words in (*named, "data.on_changed_data=warn"):
        assert words in done.errors, done.errors
    assert _everything(run_dir) == before


def test_run_may_continue_with_changed_data_and_the_manifest_says_so(table_copy, in_process):
    for name in ("a lost row and a new one", "a held-out answer", "a redrawn picture"):
        CHANGES[name][0](table_copy)
    lines = (table_copy / "held.jsonl").read_text().splitlines(keepends=True)
    (table_copy / "held.jsonl").write_text("".join(lines[1:]))  # no rewards of this one to compare at the end
    command = ("train", table_copy / "tiny.yaml", "--run-dir", table_copy / "run", "data.on_changed_data=warn")
    done = succeed(in_process(*command))
    assert "warning: the data have changed since this run began (5 differences)" in done.output
    manifest = json.loads((table_copy / "run" / "manifest.json").read_text())
    (entry,) = manifest["data_changes"]
    assert entry["count"] == 5 and any("count/train/r5 is gone" in line for line in entry["differences"])
    assert json.loads((table_copy / "run" / "summary.json").read_text())["tasks"][0]["n"] == 3


def test_a_model_from_scratch_keeps_its_tokenizer_when_the_questions_change(table_copy, in_process):
    rows_file = table_copy / "rows.jsonl"
    rows_file.write_text(rows_file.read_text().replace("How many?", "Zebras jump over violet hexagons"))
    run = table_copy / "run"
    succeed(in_process("train", table_copy / "tiny.yaml", "--run-dir", run, "data.on_changed_data=warn"))
    assert (run / "model/tokenizer.json").read_bytes() == (run / "processor/tokenizer.json").read_bytes()


def test_all_ranks_refuse_changed_data(table_copy):
    CHANGES["a redrawn picture"][0](table_copy)
    command = ("train", table_copy / "tiny.yaml", "--run-dir", table_copy / "run", "--nproc", 2)
    done = refuse(run_mmrl(*command, timeout=120))
    assert "media 0 (" in done.errors and "was lost" not in done.errors
    succeed(run_mmrl(*command, "data.on_changed_data=warn"))


def test_rollouts_of_changed_media_do_not_stop_a_resumed_run(tmp_path, in_process):
    """Rollouts made in advance, unfinished ones, and those in the replay buffer."""
    chunks = [{"kind": "generate", "partial_rollout_tokens": 2, "oversampling": 1.5, "max_tokens_per_step": 40}]
    kinds = {
        "async": {"async_rollouts": True, "replay": {}},
        "partial": {"rollout_steps": chunks, "group_size": 2, "sampling": {"max_new_tokens": 16, "temperature": 1.2}},
    }
    for name, options in kinds.items():
        folder = tmp_path / name
        folder.mkdir()
        stages = [rl_stage(steps=4, **options)]
        config = experiment(folder / "run", data={"train": [jsonl(folder, rows(8))]}, stages=stages)
        path = write(config, folder / "tiny.yaml")
        stop_in_rl(path, 3)
        for picture in folder.glob("*.png"):
            _redraw(picture)
        succeed(in_process("train", path, "data.on_changed_data=warn"))


def test_resumed_run_may_skip_bad_samples_from_now_on(table_copy, in_process):
    done = succeed(
        in_process("train", table_copy / "tiny.yaml", "--run-dir", table_copy / "run", "data.on_bad_sample=skip")
    )
    assert 'This run continues with data.on_bad_sample: "stop" -> "skip"' in done.output


def test_sample_that_turned_bad_is_named_rather_than_skipped(table_copy, in_process):
    (table_copy / "5.png").unlink()
    done = in_process("train", table_copy / "tiny.yaml", "--run-dir", table_copy / "run", "data.on_bad_sample=skip")
    refuse(done, "sample count/train/r5 is gone; rows that cannot be used: count/train/line-6: ")


def longer(run_dir: Path, steps: int) -> dict[str, Any]:
    """The experiment with another number of steps of reinforcement."""
    config = experiment(run_dir)
    config["stages"][1]["steps"] = steps
    return config


def test_a_finished_run_may_be_lengthened_and_equals_one_that_was_longer_from_the_start(whole, tmp_path, in_process):
    run_dir = Path(shutil.copytree(whole, tmp_path / "run"))
    done = succeed(in_process("train", write(longer(run_dir, 11), tmp_path / "tiny.yaml")))
    assert "This run continues with stages.1.steps: 8 -> 11 (the run is lengthened)." in done.output
    assert "01-000006: stage rl, step 6" in done.output
    fresh = write(longer(tmp_path / "fresh", 11), tmp_path / "fresh.yaml")
    assert in_process("train", fresh).code == 0
    assert reproducible_files(run_dir) == reproducible_files(tmp_path / "fresh")
    assert {path.name for path in (run_dir / "checkpoints").iterdir()} == {"01-000009", "02-000000"}
    repeated = in_process("train", tmp_path / "tiny.yaml")
    assert repeated.code == 0 and "This run is finished" in repeated.output


def test_a_stopped_run_that_decays_may_be_lengthened_where_its_decay_ends_as_before(tmp_path, in_process):
    decay = {"lr": 3e-3, "lr_schedule": "linear", "weight_decay": 0.1}
    kl = {"coef": 0.05, "schedule": "cosine", "final_frac": 0.5}
    short = [rl_stage(steps=4, optimizer=decay, loss={"kl": kl})]
    config = write(experiment(tmp_path / "run", stages=short), tmp_path / "tiny.yaml")
    stop_in_rl(config, 4)
    before = _everything(tmp_path / "run")
    refused = in_process("train", config, "stages.rl.steps=6")
    assert refused.code == 2
    assert "stages.0.steps: 4 -> 6 (optimizer.lr_schedule would decay over 6 steps; with " in refused.errors
    assert "stages.0.optimizer.decay_steps=4 it ends as it did)" in refused.errors
    assert f"mmrl export {tmp_path}/run --out DIR" in refused.errors
    refused = in_process("train", config, "stages.rl.steps=6", "stages.rl.optimizer.decay_steps=4")
    assert "loss.kl.schedule would decay over 6 steps; with stages.0.loss.kl.decay_steps=4" in refused.errors
    assert _everything(tmp_path / "run") == before
    longer = ["stages.rl.steps=6", "stages.rl.optimizer.decay_steps=4", "stages.rl.loss.kl.decay_steps=4"]
    assert in_process("train", config, *longer).code == 0
    assert in_process("train", config, *longer, "--run-dir", tmp_path / "fresh").code == 0
    assert reproducible_files(tmp_path / "run") == reproducible_files(tmp_path / "fresh")
    rates = [record["learner/lr"] for record in metrics(tmp_path / "run") if "learner/lr" in record]
    assert rates[0] == 3e-3 and rates[3:] == [0.0, 0.0, 0.0]


def test_a_run_that_cannot_be_lengthened_says_how_to_train_on_from_its_model(whole, tmp_path, in_process):
    run_dir = Path(shutil.copytree(whole, tmp_path / "run"))
    before = _everything(run_dir)
    config = write(experiment(run_dir), tmp_path / "tiny.yaml")
    train_on = f"mmrl train CONFIG model.path={run_dir}/model model.from_scratch=null run.dir=NEW"
    shorter = refuse(
        in_process("train", config, "stages.rl.steps=7"), "8 -> 7 (a run can be lengthened, not shortened)"
    )
    over = in_process("train", config, "stages.cold.steps=30")
    assert over.code == 2 and "this stage is over, and later stages have trained on from its weights" in over.errors
    assert train_on in shorter.errors and train_on in over.errors
    assert _everything(run_dir) == before
    for folder in (run_dir / "checkpoints").glob("01-*"):
        shutil.rmtree(folder)
    lost = in_process("train", config, "stages.rl.steps=9")
    refuse(lost, "none of its checkpoints is left to continue from (checkpoints.keep_last)", train_on)
    assert (run_dir / "model").is_dir()
