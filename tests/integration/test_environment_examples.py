"""Examples of environments that others wrote: minigrid, and MiniWoB in a browser, from demonstrations to GRPO."""

import re
import shutil
from importlib.util import find_spec
from pathlib import Path

import pytest
from browsers import BROWSER
from harness import Command, metrics, succeed
from zoom_runs import check_all_occurred

pytestmark = pytest.mark.slow

EXAMPLES = Path(__file__).parents[2] / "examples"
SMALL = (
    *("data.train.0.args.size=8", "data.validation.0.args.size=2", "data.test.0.args.size=4"),
    *("stages.cold.steps=2", "stages.cold.prompts_per_step=4", "stages.cold.validation.every=2"),
    *("stages.rl.steps=2", "stages.rl.prompts_per_step=2", "stages.rl.group_size=2", "stages.rl.validation.every=2"),
)


def train(in_process: Command, folder: Path, name: str) -> dict[str, list[dict]]:
    """Train an example for two steps a stage; return the metrics of its steps by stage."""
    succeed(in_process("train", EXAMPLES / f"{name}.yaml", *SMALL, "--run-dir", folder / "run"))
    steps: dict[str, list[dict]] = {"cold": [], "rl": []}
    for record in metrics(folder / "run"):
        if "environment/turns" in record:
            steps[record["stage"]].append(record)
    assert {stage: len(records) for stage, records in steps.items()} == {"cold": 2, "rl": 2}
    for record in (*steps["cold"], *steps["rl"]):
        failures = {name: record[f"environment/{name}"] for name in ("errors", "timeouts", "limits", "crashes")}
        assert not any(failures.values()), failures
    # The expert is never wrong, and each of his episodes ends.
    assert [record["environment/terminated"] for record in steps["cold"]] == [4.0, 4.0]
    assert all(record["environment/invalid"] == 0 for record in steps["cold"])
    check_all_occurred(steps["cold"], "learner/grad_norm", "environment/reward")
    return steps


def test_minigrid_is_learned_from_an_expert_and_by_grpo(tmp_path, in_process):
    pytest.importorskip("minigrid")
    steps = train(in_process, tmp_path, "minigrid")
    assert all(record["environment/turns"] > 4 for record in (*steps["cold"], *steps["rl"]))
    check_all_occurred(steps["cold"], "environment/media_shown")


@pytest.mark.skipif(not Path(BROWSER).exists(), reason=f"there is no browser {BROWSER}")
def test_buttons_are_clicked_in_a_browser(tmp_path, in_process):
    pytest.importorskip("playwright.sync_api")
    if find_spec("miniwob") is None:
        pytest.skip("the package miniwob is not installed")
    steps = train(in_process, tmp_path, "miniwob")
    # Each demonstration is one click, for which the page itself pays.
    assert [record["environment/info/success"] for record in steps["cold"]] == [4.0, 4.0]
    assert [record["environment/turns"] for record in steps["cold"]] == [4.0, 4.0]


def test_config_on_the_page_trains_the_environment_beside_it(tmp_path, in_process):
    page = (EXAMPLES.parent / "docs" / "extending" / "environment.md").read_text()
    (config,) = re.findall(r"```yaml\n(run: .*?)```", page, re.S)
    (tmp_path / "guess.yaml").write_text(config)
    shutil.copy(EXAMPLES / "environment.py", tmp_path)
    succeed(in_process("train", tmp_path / "guess.yaml", "--run-dir", tmp_path / "run"))
    cold = [record for record in metrics(tmp_path / "run") if record["stage"] == "cold" and "learner/loss" in record]
    assert [record["environment/terminated"] for record in cold] == [8.0, 8.0]
    assert all(record["environment/invalid"] == record["environment/errors"] == 0 for record in cold)
