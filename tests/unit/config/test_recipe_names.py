"""Recipes by name, their data folder, and overlays."""

from dataclasses import replace
from pathlib import Path

import pytest
from config_samples import SMALL, refused, write

from mmrl.cli import main
from mmrl.config import check_data_files, load_config, recipes
from mmrl.config.recipes import find_missing_data, read_header
from mmrl.types import UserError

HEADER = """\
# Counter (arXiv:2501.00001): counts things.
# Task: counting
# Data: two files
#   of which one has pictures.
#   $ hf download counts/rows --local-dir rows
#   $ wget pictures.zip && unzip pictures.zip
# A remark, which belongs to no label:
#   neither does this.
# Departures: none is large; the second.

"""
RECIPE = HEADER + SMALL.replace(
    "fn: mmrl_datasets.generators.scenes:count",
    "fn: a:b\n      args: {path: '${data}/rows/a.jsonl', media_root: '${data}/pictures'}",
)


@pytest.fixture
def shipped(tmp_path, monkeypatch):
    """A folder of configs in place of ours."""
    for kind in ("recipes", "overlays"):
        (tmp_path / kind).mkdir()
    (tmp_path / "recipes" / "counter.yaml").write_text(RECIPE)
    monkeypatch.setattr(recipes, "configs_folder", lambda: tmp_path)
    return tmp_path


def lay(shipped, name, text):
    (shipped / "overlays" / f"{name}.yaml").write_text(text)


def test_a_recipe_is_found_by_name_and_extended_by_name(shipped, tmp_path):
    assert load_config("counter").config.run.name == "demo"
    mine = write(tmp_path, "extends: counter\nrun: {name: mine}\n", "mine.yaml")
    assert load_config(mine).config.run.name == "mine"


@pytest.mark.parametrize(
    ("name", "message"),
    [("countre", "did you mean counter?"), ("xyz", "; `mmrl recipe list` shows all"), ("countre.yaml", "no such file")],
)
def test_a_mistyped_recipe_name_suggests_the_nearest(shipped, name, message):
    assert message in refused(name)


def test_a_header_has_labels_and_download_commands(shipped):
    header = read_header(shipped / "recipes" / "counter.yaml")
    assert (header.title, header.summary) == ("Counter (arXiv:2501.00001)", "counts things")
    assert header.sections["Data"] == "two files of which one has pictures."
    assert header.downloads == ("hf download counts/rows --local-dir rows", "wget pictures.zip && unzip pictures.zip")
    assert header.sections["Departures"] == "none is large; the second."


@pytest.mark.parametrize(
    ("line", "title", "summary"),
    [
        ("# A 3B model on one GPU: every weight by GRPO.", "A 3B model on one GPU", "every weight by GRPO"),
        ("# R1-V (github.com/a/b): counting; no: more.", "R1-V (github.com/a/b)", "counting; no: more"),
        ("# A title alone", "A title alone", ""),
        ("run: {name: bare}", "", ""),
    ],
)
def test_the_first_line_has_a_title_and_a_summary(tmp_path, line, title, summary):
    header = read_header(Path(write(tmp_path, f"{line}\n", "mine.yaml")))
    assert (header.title, header.summary) == (title, summary)


def test_data_variable_expands_to_the_data_folder_and_media_root(shipped, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    loaded = load_config("counter", ["data.dir=sets"])
    assert loaded.config.data.train[0].args["path"] == f"{tmp_path}/sets/rows/a.jsonl"
    assert loaded.config.data.media_roots == (f"{tmp_path}/sets",)
    assert loaded.data_files == ("rows/a.jsonl", "pictures")
    mine = write(tmp_path, "extends: counter\ndata: {dir: below, media_roots: [/m]}\n", "mine.yaml")
    data = load_config(mine).config.data
    assert (data.dir, data.media_roots) == (f"{tmp_path}/below", ("/m",))
    # What a base sets starts from the folder of the config, as all its relative paths do.
    (tmp_path / "mine").mkdir()
    above = write(tmp_path / "mine", "extends: ../mine.yaml\n", "above.yaml")
    assert load_config(above).config.data.dir == f"{tmp_path}/mine/below"


def test_missing_data_files_are_listed_with_their_download_commands(shipped, tmp_path):
    with pytest.raises(UserError, match="--data DIR"):
        check_data_files(load_config("counter"))
    loaded = load_config("counter", [f"data.dir={tmp_path}"])
    with pytest.raises(UserError, match="hf download counts/rows") as error:
        check_data_files(loaded)
    elsewhere = load_config("counter", [f"data.dir={tmp_path}/nowhere"])
    with pytest.raises(UserError, match=f"^{tmp_path}/nowhere: there is no such folder\n"):
        check_data_files(elsewhere)
    rows, pictures, text = str(error.value).splitlines()
    assert rows == f"{tmp_path}: has no rows/a.jsonl; run there: hf download counts/rows --local-dir rows"
    assert pictures == f"{tmp_path}: has no pictures; run there: wget pictures.zip && unzip pictures.zip"
    assert text == "Data: two files of which one has pictures."
    (tmp_path / "rows").mkdir()
    (tmp_path / "rows" / "a.jsonl").touch()
    assert find_missing_data(loaded) == {"pictures": "; run there: wget pictures.zip && unzip pictures.zip"}
    with pytest.raises(UserError, match=r"has no pictures; run there: wget pictures.zip"):
        check_data_files(loaded)
    (tmp_path / "pictures").mkdir()
    check_data_files(loaded)
    check_data_files(replace(loaded, files=(tmp_path / "gone.yaml",)))


def test_a_missing_file_without_a_command_is_listed_with_the_data_text(shipped, tmp_path):
    loaded = load_config("counter", [f"data.dir={tmp_path}", 'data.train.0.args.path="${data}/own.jsonl"'])
    (tmp_path / "pictures").mkdir()
    with pytest.raises(UserError) as error:
        check_data_files(loaded)
    first, text = str(error.value).splitlines()
    assert first == f"{tmp_path}: has no own.jsonl; no command of the header fetches it"
    assert text == "Data: two files of which one has pictures."
    with pytest.raises(UserError, match=r"has no own.jsonl$"):
        check_data_files(replace(loaded, files=(tmp_path / "gone.yaml",)))


def test_a_download_command_is_matched_by_whole_folder_names(shipped, tmp_path):
    loaded = load_config("counter", [f"data.dir={tmp_path}", 'data.train.0.args.path="${data}/row/a.jsonl"'])
    (tmp_path / "pictures").mkdir()
    with pytest.raises(UserError, match=r"has no row/a.jsonl; no command of the header fetches it"):
        check_data_files(loaded)


def test_stages_of_a_mapping_are_merged_by_name_and_by_kind(shipped, tmp_path):
    text = """\
extends: counter
stages:
  warm: {kind: sft, steps: 1}
  kind:rl: {group_size: 4, loss: {kl: {coef: 0.5}}}
  cold: null
  late: {kind: sft, steps: 2}
"""
    stages = load_config(write(tmp_path, text, "mine.yaml")).config.stages
    assert [(stage.name, stage.steps) for stage in stages] == [("warm", 1), ("rl", 20), ("late", 2)]
    assert (stages[1].group_size, stages[1].loss.kl.coef) == (4, 0.5)


def test_rollout_steps_of_a_mapping_are_changed_added_and_removed_and_the_others_stay(shipped, tmp_path):
    steps = "[{kind: generate}, {kind: probe, corruption: grey}, {kind: tools, name: zoom, tools: [{fn: 'a:b'}]}]"
    base = write(tmp_path, f"extends: counter\nstages: {{rl: {{rollout_steps: {steps}}}}}\n", "base.yaml")
    lay(shipped, "partial", "stages: {kind:rl: {rollout_steps: {kind:generate: {partial_rollout_tokens: 9}}}}\n")
    lay(shipped, "more", "stages: {rl: {rollout_steps: {own: {kind: custom, fn: 'c:d'}, zoom: {max_turns: 2}}}}\n")
    lay(shipped, "less", "stages: {rl: {rollout_steps: {kind:probe: null}}}\n")
    loaded = load_config(base, ["overlays=[partial, more, less]"])
    generate, own, zoom = loaded.config.stages[1].rollout_steps
    assert (generate.partial_rollout_tokens, own.fn, zoom.max_turns, zoom.tools[0].fn) == (9, "c:d", 2, "a:b")
    assert loaded.origins["stages.1.rollout_steps.0.partial_rollout_tokens"].endswith("partial.yaml:1")
    # A stage that does not write the key has the default step.
    (generate,) = load_config("counter", ["overlays=[partial]"]).config.stages[1].rollout_steps
    assert generate.partial_rollout_tokens == 9
    lay(shipped, "twin", "stages: {twin: {copy_of: rl, rollout_steps: {kind:probe: {every: 3}}}}\n")
    assert load_config(base, ["overlays=[twin]"]).config.stages[2].rollout_steps[1].every == 3
    said = "more.yaml:1: rollout_steps: there is no 'zoom' to change; there are unnamed (generate)"
    assert said in refused("counter", "overlays=[more]")
    lay(shipped, "short", "stages: {kind:rl: {rollout_steps: {kind:generate: {partial_rollout_tokens: 4}}}}\n")
    said = "partial sets stages.rl.rollout_steps.0.partial_rollout_tokens to 9 and short to 4; use one"
    assert said in refused(base, "overlays=[partial, short]")


@pytest.mark.parametrize("key", ["grpo", "kind:sample"])
def test_a_stage_that_is_not_there_is_refused(shipped, tmp_path, key):
    message = refused(write(tmp_path, f"extends: counter\nstages:\n  {key}: {{steps: 3}}\n", "mine.yaml"))
    assert f"mine.yaml:3: stages: there is no '{key}' to change; there are cold (sft), rl (rl)" in message


def test_a_change_of_a_stage_into_another_kind_is_refused_where_it_is_written(shipped, tmp_path):
    lay(shipped, "imitate", "# Imitate (arXiv:2501.00002): demonstrations.\nstages:\n  rl: {kind: sft, steps: 3}\n")
    message = refused("counter", "overlays=[imitate]")
    assert message.endswith("imitate.yaml:3: stages: 'rl' is of kind rl, not sft")


def test_reward_terms_are_changed_added_and_removed_by_name(shipped, tmp_path):
    named = 'extends: counter\nrewards: {terms: [{fn: "mmrl_rewards.number:exact", name: count}]}\n'
    text = f"""extends: {write(tmp_path, named, "named.yaml")}
rewards:
  terms:
    count: {{weight: 0.0}}
    long: {{fn: "mmrl_rewards.length:overlong", args: {{max_tokens: 64, buffer: 8}}}}
  group_rewards: {{vote: {{fn: "mmrl.algo.group_rewards:majority_vote"}}}}
"""
    file = write(tmp_path, text, "mine.yaml")
    rewards = load_config(file).config.rewards
    assert [(term.name, term.weight) for term in rewards.terms] == [("count", 0.0), ("long", 1.0)]
    assert rewards.terms[0].fn == "mmrl_rewards.number:exact"
    assert [reward.name for reward in rewards.group_rewards] == ["vote"]
    removed = write(tmp_path, f"extends: {file}\nrewards: {{terms: {{count: null}}}}\n", "removed.yaml")
    assert [term.name for term in load_config(removed).config.rewards.terms] == ["long"]
    wrong = write(tmp_path, "extends: counter\nrewards: {terms: {size: {weight: 2.0}}}\n", "wrong.yaml")
    assert "rewards.terms: there is no 'size' to change; there are unnamed (mmrl_rewards.number:exact)" in refused(
        wrong
    )


def test_a_copied_stage_is_inserted_before_the_next_changed_one(shipped, tmp_path):
    text = """extends: counter
stages:
  pilot: {copy_of: kind:rl, steps: 2, track_rewards: [count]}
  best: {kind: select, results_of: pilot, metric: limr}
  kind:rl: {samples_of: best}
"""
    stages = load_config(write(tmp_path, text, "mine.yaml")).config.stages
    assert [stage.name for stage in stages] == ["cold", "pilot", "best", "rl"]
    pilot, rl = stages[1], stages[3]
    assert rl.model_copy(update={"name": "pilot", "steps": 2, "track_rewards": ("count",), "samples_of": None}) == pilot
    wrong = write(tmp_path, "extends: counter\nstages: {a: {copy_of: grpo}}\n", "wrong.yaml")
    assert "wrong.yaml:2: stages: there is no 'grpo' to change" in refused(wrong)


def test_overlays_come_after_the_recipe_and_before_the_command_line(shipped):
    lay(shipped, "short", "stages: {'kind:rl': {steps: 5, group_size: 4}}\n")
    lay(shipped, "seeded", "run: {seed: 3}\n")
    loaded = load_config("counter", ["stages.rl.steps=6", "overlays=[short, seeded]"])
    assert (loaded.config.stages[1].steps, loaded.config.stages[1].group_size) == (6, 4)
    assert (loaded.config.run.name, loaded.config.run.seed) == ("demo-short-seeded", 3)
    assert loaded.origins["stages.1.group_size"].endswith("overlays/short.yaml:1")


def test_overlays_that_disagree_are_refused(shipped):
    lay(shipped, "one", "run: {seed: 1}\n")
    lay(shipped, "two", "run: {seed: 2}\n")
    assert "one sets run.seed to 1 and two to 2" in refused("counter", "overlays=[one, two]")
    lay(shipped, "kind", "stages: {'kind:rl': {steps: 5, rollout_steps: [{kind: generate}]}}\n")
    lay(shipped, "named", "stages: {rl: {steps: 6}}\n")
    lay(shipped, "longer", "stages: {rl: {rollout_steps: [{kind: generate}, {fn: 'a:b'}]}}\n")
    lay(shipped, "without", "stages: {rl: null}\n")
    for order in ("kind, named", "named, kind"):
        first, second = order.split(", ")
        values = {"kind": 5, "named": 6}
        said = f"{first} sets stages.rl.steps to {values[first]} and {second} to {values[second]}; use one"
        assert said in refused("counter", f"overlays=[{order}]")
    assert "kind sets stages.rl.rollout_steps to [{'kind': 'generate'}] and longer to [{" in refused(
        "counter", "overlays=[kind, longer]"
    )
    assert "named sets stages.rl.steps to 6 and without to None" in refused("counter", "overlays=[named, without]")
    assert "none of the overlays has this name; did you mean one?" in refused("counter", "overlays=[on]")
    assert "must be a file name" in refused("counter", "overlays=[3]")


def test_a_copied_stage_is_no_disagreement_until_both_overlays_set_it(shipped):
    lay(shipped, "pilot", "stages: {pilot: {copy_of: kind:rl, group_size: 2}, 'kind:rl': {group_size: 6}}\n")
    lay(shipped, "long", "stages: {'kind:rl': {steps: 50}}\n")
    lay(shipped, "wide", "stages: {'kind:rl': {group_size: 6}}\n")
    _, pilot, rl = load_config("counter", ["overlays=[pilot, long]"]).config.stages
    assert (pilot.steps, pilot.group_size, rl.steps, rl.group_size) == (50, 2, 50, 6)
    assert load_config("counter", ["overlays=[wide, pilot]"]).config.stages[1].group_size == 2
    assert "pilot sets stages.pilot.group_size to 2 and wide to 6" in refused("counter", "overlays=[pilot, wide]")


def test_overlay_options_add_to_those_of_the_file_and_an_override_replaces_them(shipped, tmp_path, capsys):
    lay(shipped, "seeded", "run: {seed: 3}\n")
    lay(shipped, "named", "run: {name: other}\n")
    lay(shipped, "long", "stages: {'kind:rl': {steps: 50}}\n")
    mine = write(tmp_path, "extends: counter\noverlays: [seeded]\n", "mine.yaml")
    for words, name in (
        (["--overlay", "long"], "demo-seeded-long"),
        (["--overlay", "named", "--overlay", "long", "--overlay", "seeded"], "other-seeded-named-long"),
        (["overlays=[long]"], "demo-long"),
        (["overlays=[]", "--overlay", "long"], "demo-long"),
    ):
        main(["explain", str(mine), *words])
        assert f" run.name {name} " in " ".join(capsys.readouterr().out.split())


def test_options_stand_for_overrides_and_a_file_may_lay_overlays(shipped, tmp_path, capsys):
    lay(shipped, "seeded", "run: {seed: 3}\n")
    text = "extends: counter\noverlays: [seeded]\nmodel: {from_scratch: null}\n"
    mine = write(tmp_path, text.replace("[seeded]", "./overlays/seeded.yaml"), "mine.yaml")
    assert load_config(mine, ["model.path=x"]).config.run.seed == 3
    command = ["explain", mine, "--model", "/m", "--data", "/d", "--overlay", "seeded", "run.seed=4"]
    main(list(map(str, command)))
    page = capsys.readouterr().out
    for setting in ("run.name demo-seeded", "model.path /m", "data.dir /d", "run.seed 4"):
        key, value = setting.split()
        assert any(line.split()[:2] == [key, value] for line in page.splitlines()), setting
    # A shell writes this for a variable that is not set; the recipe's own model must not take its place.
    main(["explain", str(mine), "--model", ""])
    assert ["model.path", "''"] in [line.split()[:2] for line in capsys.readouterr().out.splitlines()]


def test_a_recipe_without_commands_shows_those_of_the_one_it_extends(shipped, tmp_path, capsys):
    (shipped / "recipes" / "second.yaml").write_text("# Second: counts again.\nextends: counter.yaml\n")
    assert main(["recipe", "show", "second", "--data", str(tmp_path)]) == 0
    assert "missing  rows/a.jsonl; run there: hf download counts/rows --local-dir rows\n" in capsys.readouterr().out


def test_recipes_are_listed_by_words_and_shown_with_what_is_missing(shipped, tmp_path, capsys):
    assert main(["recipe", "list", "COUNT", "number:exact"]) == 0
    assert capsys.readouterr().out == f"counting:\n  {'counter':25}  counts things\n"
    assert main(["recipe", "list", "video"]) == 1
    capsys.readouterr()
    (tmp_path / "pictures").mkdir()
    assert main(["recipe", "show", "counter", "--data", str(tmp_path)]) == 0
    page = capsys.readouterr().out
    rows, pictures = page.splitlines()[-4:-2]
    assert rows == f"{tmp_path}: missing  rows/a.jsonl; run there: hf download counts/rows --local-dir rows"
    assert pictures == f"{tmp_path}: has  pictures"
    assert page.startswith(HEADER.strip()) and "\nStages: cold (sft), rl (rl)\n" in page
    assert page.endswith("To train: mmrl train counter --model DIR --data DIR\n")


def test_a_folder_is_not_a_recipe(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine").mkdir()
    assert refused(Path("mine")) == "mine is a directory; name the .yaml file in it"
