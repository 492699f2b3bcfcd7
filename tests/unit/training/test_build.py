"""Data that cannot be used are refused when a run is built, before a model is made."""

from contextlib import ExitStack

import pytest
from factories import make_config, make_context, make_sample
from pydantic import ValidationError

from mmrl.config.schema import DataSourceConfig
from mmrl.data.load import DataSplits, check_stages_have_samples
from mmrl.data.rows import load_dataset_function, read_source
from mmrl.distributed.ranks import SingleProcess
from mmrl.log.console import Console
from mmrl.log.run_dir import RunDir
from mmrl.training.build import RunSetup, build_run
from mmrl.training.functions import load_functions
from mmrl.types import ImageRef, UserError

DATASET = """
from mmrl.types import AnswerType, ImageRef, RejectedRow, Sample, Target

def rows(
    context, *, ids: tuple[str, ...], broken: tuple[str, ...] = (), missing: tuple[str, ...] = (), task: str = "t"
):
    for name in ids:
        yield Sample(id=name, task=task, parts=("?",), target=Target(answer_type=AnswerType.NUMBER, value=1))
    for name in broken:
        yield RejectedRow(name, "no answer in the row")
    for name in missing:
        parts = (ImageRef(path=str(context.base_dir / "nowhere.png"), sha256=""), "?")
        yield Sample(id=name, task="t", parts=parts, target=Target(answer_type=AnswerType.NUMBER, value=1))

def words(context):
    yield "a word"

def nothing(context):
    return None

constant = 3
"""
FROM_SCRATCH = {"from_scratch": {}, "dtype": "float32"}


@pytest.fixture(autouse=True)
def dataset_file(tmp_path):
    (tmp_path / "mine.py").write_text(DATASET)


def build(folder, data, *, fn="rows", on_bad_sample="stop", model=FROM_SCRATCH, ranks=None, **stage):
    """Build a run, and close it again; `data` has the options of the dataset function by split."""
    sources = {split: [{"fn": f"./mine.py:{fn}", "args": args}] for split, args in data.items()}
    config = make_config(
        model=model,
        data={**sources, "on_bad_sample": on_bad_sample},
        stages=[{"kind": "rl", "name": "rl", "steps": 1, "prompts_per_step": 1, **stage}],
    )
    setup = RunSetup(
        config=config,
        base_dir=folder,
        functions=load_functions(config, folder),
        run_dir=RunDir(folder / "run"),
        console=Console(),
        ranks=ranks or SingleProcess(),
    )
    with ExitStack() as resources:
        return build_run(setup, resources)


def test_usable_samples_are_all_there(tmp_path):
    data = {"train": {"ids": ["a", "b"]}, "validation": {"ids": ["c"]}, "test": {"ids": ["c"]}}
    samples = build(tmp_path, data).samples
    assert [len(split) for split in samples.by_split().values()] == [2, 1, 1]


class RecordingRanks(SingleProcess):
    """Records the activity at each call on rank 0."""

    def __init__(self):
        super().__init__()
        self.activity, self.calls = "", []

    def on_rank0(self, work):
        self.calls.append(self.activity)
        return super().on_rank0(work)

    def set_activity(self, activity):
        self.activity = activity


def test_long_trials_of_rewards_exchange_often(tmp_path, monkeypatch):
    """Other ranks would report rank 0 as lost. The batches of seven samples have 1, 2 and 4, or fewer if it is slow."""
    monkeypatch.setattr("mmrl.training.build.EXCHANGE_EVERY_S", 0.0)
    ranks = RecordingRanks()
    build(tmp_path, {"train": {"ids": list("abcdefg")}}, ranks=ranks)
    assert ranks.calls.count("trying rewards") >= 4
    assert ranks.activity == "starting"


PARTIAL = [{"kind": "generate", "partial_rollout_tokens": 8, "oversampling": 1.5}]


@pytest.mark.parametrize(
    ("data", "options", "message"),
    [
        ({"train": {"ids": ["a", "b"]}, "test": {"ids": ["b"]}}, {}, "'b' is in the training and the held-out data"),
        ({"train": {"ids": ["a"]}, "validation": {"ids": ["b"], "task": "mean"}}, {}, "'b' is of the task 'mean'"),
        ({"train": {"ids": ["a", "a"]}}, {}, "two samples have the id 'a'.* `name`"),
        ({"train": {"ids": ["a"]}}, {"prompts_per_step": 2}, "'rl' needs 2 prompts per step and there are 1"),
        (
            {"train": {"ids": ["a", "b"]}},
            {"prompts_per_step": 2, "rollout_steps": PARTIAL},
            "'rl' needs 3 prompts per step and there are 2.*oversampling",
        ),
        ({"train": {}}, {"fn": "constant"}, r"'\./mine\.py:constant' is not a function"),
        ({"train": {"id": ["a"]}}, {}, "has no option 'id'; did you mean 'ids'"),
    ],
)
def test_data_that_cannot_be_trained_on_is_refused(tmp_path, data, options, message):
    with pytest.raises(UserError, match=message):
        build(tmp_path, data, **options)


def test_a_sample_stage_without_samples_is_refused(tmp_path):
    draw = {"kind": "sample", "name": "draw", "when": {"task": ["none"]}}
    stages = [draw, {"kind": "rl", "name": "rl", "steps": 1, "prompts_per_step": 1}]
    sample = make_sample()
    with pytest.raises(UserError, match=r"'draw' has nothing to sample from: there are 0 samples \(see its `when`\)"):
        check_stages_have_samples(make_config(stages=stages), [sample], {sample.id: 0})


@pytest.mark.parametrize("split", ["train", "validation", "test"])
@pytest.mark.parametrize("args", [{"ids": []}, {"ids": [], "broken": ["x"]}])
def test_source_without_a_usable_sample_is_refused(tmp_path, split, args):
    with pytest.raises(UserError, match=f"data.{split}: there are no usable samples"):
        build(tmp_path, {"train": {"ids": ["a"]}, split: args}, on_bad_sample="skip")


def test_bad_samples_are_counted_and_listed(tmp_path):
    with pytest.raises(UserError) as caught:
        build(tmp_path, {"train": {"ids": ["a"], "broken": ["b"], "missing": ["c"]}})
    for words in ("data.train: 2 of 3 samples", "b: no answer in the row", "nowhere.png: no such file"):
        assert words in str(caught.value)


def test_damaged_processor_is_found_before_any_data_is_read(tmp_path):
    (tmp_path / "m").mkdir()
    (tmp_path / "m" / "config.json").write_text('{"model_type": "qwen2_vl"}')
    with pytest.raises(UserError, match=r"model\.path: cannot load"):
        build(tmp_path, {"train": {"ids": [], "broken": ["x"]}}, model={"path": str(tmp_path / "m")})


def test_name_of_a_source_precedes_the_ids_of_its_rows(tmp_path):
    source = DataSourceConfig(fn="./mine.py:rows", args={"ids": ["a", "b"], "broken": ["c"]}, name="left")
    rows = read_source(source, load_dataset_function(source, tmp_path), make_context(tmp_path), "train")
    assert [row.id for row in rows] == ["left/a", "left/b", "left/c"]
    with pytest.raises(ValidationError, match="name"):
        DataSourceConfig(fn="./mine.py:rows", name="a name")


@pytest.mark.parametrize(("function", "said"), [("words", "yielded 'a word'"), ("nothing", "returned None; let it")])
def test_source_that_yields_something_else_is_refused(tmp_path, function, said):
    source = DataSourceConfig(fn=f"./mine.py:{function}")
    with pytest.raises(UserError, match=said):
        list(read_source(source, load_dataset_function(source, tmp_path), make_context(tmp_path), "train"))


def test_digest_of_samples_depends_on_their_content_and_not_on_paths():
    def digest(path="a.png", sha256="12", answer=3):
        sample = make_sample(answer, parts=(ImageRef(path=path, sha256=sha256), "?"))
        return DataSplits(train=(sample,), validation=(), test=(), source_indices={}).content_hashes()["train"]

    assert digest(path="elsewhere/b.png") == digest()
    assert len({digest(), digest(sha256="34"), digest(answer=4)}) == 3
