"""Data that cannot be used are refused when a run is built, before a model is made."""

import json
from contextlib import ExitStack

import pytest
from pydantic import ValidationError

from mmrl.config import Config
from mmrl.config.schema import DataSourceConfig
from mmrl.data.load import DataSplits
from mmrl.data.rows import load_dataset_function, read_source
from mmrl.distributed.ranks import SingleProcess
from mmrl.log.console import Console
from mmrl.log.run_dir import RunDir
from mmrl.training.build import RunSetup, build_run
from mmrl.training.functions import load_functions
from mmrl.types import AnswerType, DatasetContext, ImageRef, Sample, Target, UserError

ROWS = """
from mmrl.types import AnswerType, ImageRef, RejectedRow, Sample, Target

def rows(place, *, ids: tuple[str, ...], broken: tuple[str, ...] = (), missing: tuple[str, ...] = ()):
    for name in ids:
        yield Sample(id=name, task="t", parts=("?",), target=Target(answer_type=AnswerType.NUMBER, value=1))
    for name in broken:
        yield RejectedRow(name, "no answer in the row")
    for name in missing:
        parts = (ImageRef(path=str(place.base_dir / "nowhere.png"), sha256=""), "?")
        yield Sample(id=name, task="t", parts=parts, target=Target(answer_type=AnswerType.NUMBER, value=1))

constant = 3
"""


FROM_SCRATCH = {"from_scratch": {}, "dtype": "float32"}


def open_context(config, folder):
    """Build what outlives the stages of a run, and close it again."""
    setup = RunSetup(
        config=config,
        base_dir=folder,
        functions=load_functions(config, folder),
        run_dir=RunDir(folder / "run"),
        console=Console(),
        ranks=SingleProcess(),
    )
    with ExitStack() as resources:
        return build_run(setup, resources)


@pytest.fixture
def tiny(tmp_path):
    """Builds what a run needs from arguments for `rows` by part of the data."""
    (tmp_path / "mine.py").write_text(ROWS)

    def tiny(
        *,
        fn="./mine.py:rows",
        bad_sample="stop",
        prompts_per_step=1,
        program=({"kind": "generate"},),
        model=FROM_SCRATCH,
        **parts,
    ):
        data = {name: [{"fn": fn, "args": args}] for name, args in parts.items()} | {"on_bad_sample": bad_sample}
        config = {
            "run": {"name": "r", "dir": str(tmp_path / "run")},
            "model": model,
            "data": data,
            "rewards": {"terms": [{"fn": "mmrl_rewards.number:exact"}]},
            "stages": [
                {"kind": "rl", "name": "rl", "steps": 1, "prompts_per_step": prompts_per_step, "rollout_steps": program}
            ],
        }
        return open_context(Config.model_validate_json(json.dumps(config)), tmp_path)

    return tiny


@pytest.mark.parametrize("part", ["train", "validation", "test"])
@pytest.mark.parametrize("args", [{"ids": []}, {"ids": [], "broken": ["x"]}])
def test_a_source_without_one_usable_sample_is_refused(tiny, part, args):
    parts = {"train": {"ids": ["a"]}, part: args}
    with pytest.raises(UserError, match=f"data.{part}: there is not one usable sample"):
        tiny(bad_sample="skip", **parts)


def test_bad_samples_are_counted_and_listed(tiny):
    with pytest.raises(UserError) as caught:
        tiny(train={"ids": ["a"], "broken": ["b"], "missing": ["c"]})
    text = str(caught.value)
    assert "data.train: 2 of 3 samples cannot be used" in text
    assert "b: no answer in the row" in text
    assert "nowhere.png: no such file" in text


def test_one_sample_cannot_be_trained_on_and_held_out(tiny):
    with pytest.raises(UserError, match="sample 'b' is in the training and the held-out data; where they are"):
        tiny(train={"ids": ["a", "b"]}, test={"ids": ["b"]})
    with pytest.raises(UserError, match="two samples have the id 'a'; .* give one of their sources a `name`"):
        tiny(train={"ids": ["a", "a"]})


def test_sources_whose_ids_meet_are_told_apart_by_name(tmp_path):
    (tmp_path / "mine.py").write_text(ROWS)
    place = DatasetContext(work_dir=tmp_path, base_dir=tmp_path, seed=0)
    source = DataSourceConfig(fn="./mine.py:rows", args={"ids": ["a", "b"], "broken": ["c"]}, name="left")
    read_rows = load_dataset_function(source, tmp_path)
    assert [row.id for row in read_source(source, read_rows, place)] == ["left/a", "left/b", "left/c"]
    with pytest.raises(ValidationError, match="name"):
        DataSourceConfig(fn="./mine.py:rows", name="a name")


def test_a_data_source_yields_samples_and_rejected_rows_alone(tmp_path):
    (tmp_path / "words.py").write_text("def rows(context):\n    yield 'a word'\n")
    place = DatasetContext(work_dir=tmp_path, base_dir=tmp_path, seed=0)
    source = DataSourceConfig(fn="./words.py:rows")
    with pytest.raises(UserError, match="yielded 'a word', neither a Sample nor a RejectedRow"):
        list(read_source(source, load_dataset_function(source, tmp_path), place))


def test_a_step_does_not_draw_more_samples_than_there_are(tiny):
    with pytest.raises(UserError, match="stage 'rl' needs 2 prompts a step and there are 1 samples"):
        tiny(train={"ids": ["a"]}, prompts_per_step=2)
    chunked = [{"kind": "generate", "partial_rollout_tokens": 8, "oversampling": 1.5}]
    with pytest.raises(UserError, match="stage 'rl' needs 3 prompts a step and there are 2 .* or oversampling"):
        tiny(train={"ids": ["a", "b"]}, prompts_per_step=2, program=chunked)


def test_good_data_is_all_there(tiny):
    samples = tiny(train={"ids": ["a", "b"]}, validation={"ids": ["c"]}, test={"ids": ["c"]}).samples
    assert [len(split) for split in samples.by_split().values()] == [2, 1, 1]


def test_a_damaged_processor_is_found_before_any_data(tiny, tmp_path):
    (tmp_path / "m").mkdir()
    (tmp_path / "m" / "config.json").write_text('{"model_type": "qwen2_vl"}')
    with pytest.raises(UserError, match=r"model\.path: cannot load"):
        tiny(model={"path": str(tmp_path / "m")}, train={"ids": [], "broken": ["x"]})


def test_a_source_must_be_a_function_with_these_options(tiny):
    with pytest.raises(UserError, match=r"'\./mine\.py:constant' is not a function"):
        tiny(fn="./mine.py:constant", train={})
    with pytest.raises(UserError, match=r"data source './mine.py:rows' has no option 'id'; did you mean 'ids'\?"):
        tiny(train={"id": ["a"]})


def test_a_digest_follows_what_the_samples_say_not_where_they_lie():
    def digest(path="a.png", sha256="12", answer=3):
        target = Target(answer_type=AnswerType.NUMBER, value=answer)
        sample = Sample(id="x", task="t", parts=(ImageRef(path=path, sha256=sha256), "?"), target=target)
        return DataSplits(train=(sample,), validation=(), test=(), source_indices={}).content_hashes()["train"]

    assert digest(path="elsewhere/b.png") == digest()
    assert len({digest(), digest(sha256="34"), digest(answer=4)}) == 3
