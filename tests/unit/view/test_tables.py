"""Metrics, settings and benchmarks of a page."""

import pytest
from view_runs import make_run, write_benchmark

from mmrl.config.secrets import MASK
from mmrl.view.media import PictureStore
from mmrl.view.run_documents import RunDocuments, build_metrics, list_panels, list_settings


def test_lines_of_one_step_are_merged_and_the_last_timing_counts():
    lines = [{"stage": "rl", "step": 1, "reward/mean": 0.5}, {"stage": "rl", "step": 1, "validation/a": 0.25}]
    timings = [{"stage": "rl", "step": 1, "time/learn_s": 9.0}, {"stage": "rl", "step": 1, "time/learn_s": 2.0}]
    document = build_metrics([*lines, *timings])
    assert document["columns"] == {"reward/mean": [0.5], "time/learn_s": [2.0], "validation/a": [0.25]}
    assert "reward" in document["meanings"]["reward/mean"]


def test_steps_are_counted_on_over_the_stages():
    lines = [{"stage": "cold", "step": 2}, {"stage": "rl", "step": 3}, {"stage": None, "step": 0, "test/a": 1.0}]
    document = build_metrics(lines)
    assert document["global"] == [2, 5, 5]
    assert document["columns"]["test/a"] == [None, None, 1.0]


def test_values_that_are_no_numbers_are_left_out():
    lines = [{"stage": "rl", "step": 1, "a": None, "b": "x", "c": 1 / 3}, {"stage": 3, "step": 1}, {"step": None}]
    assert build_metrics(lines)["columns"] == {"a": [None], "c": [0.333333]}


def test_every_column_has_one_panel_in_the_order_of_the_page():
    columns = ["a/b", "learner/grad_norm", "learner/grad_norm/vision", "policy/clip_frac", "policy/clip_frac_low"]
    panels = list_panels([*columns, "reward/mean", *(f"reward/term/{number:02d}" for number in range(13))])
    found = [(panel["title"], len(panel["columns"])) for panel in panels]
    expected = [("Reward", 1), ("Reward by term", 12), ("Clipped tokens", 2), ("Gradient norm", 1)]
    # A panel has room for twelve lines.
    assert found == [*expected, ("Gradient norm by component", 1), ("a/b", 1), ("reward/term/12", 1)]
    places = [panel["place"] for panel in panels]
    assert places == sorted(set(places))


@pytest.mark.parametrize(
    ("path", "text", "shown"),
    [
        ("judge.api_key", "abc", MASK),
        ("logging.trackers.0.token", "abc", MASK),
        ("args.passwords.1", "abc", MASK),
        ("args.WANDB-API-KEY", "abc", MASK),
        ("judge.url", "https://me:pw@host/v1", f"https://{MASK}@host/v1"),
        ("judge.url", "https://host/v1?api_key=abc&x=1", f"https://host/v1?api_key={MASK}&x=1"),
        ("args.note", "use hf_abcdefghijklmnop1234 here", f"use {MASK} here"),
        ("args.header", "Bearer abc.def", MASK),
        ("model.path", "models/key-frames", "models/key-frames"),
        ("stages.0.monkey", "banana", "banana"),
        ("judge.api_key", "", ""),
    ],
)
def test_secrets_in_settings_are_masked(path, text, shown):
    assert list_settings({path: text}) == [[path, shown]]


def test_numbers_under_a_key_like_tokens_are_shown():
    assert list_settings({"rollout": {"max_new_tokens": 512, "token": None}}) == [
        ["rollout.max_new_tokens", "512"],
        ["rollout.token", "null"],
    ]


def open_benchmark(path):
    """Return entry and document of the only benchmark in a folder."""
    run = RunDocuments("r0", path, PictureStore(with_media=False), ())
    (entry,) = run.build_entry()["benchmarks"]
    return entry, run.list_documents()[entry["key"]]()


def test_a_benchmark_of_a_run_has_the_span_that_was_read_and_the_rule(tmp_path):
    entry, document = open_benchmark(make_run(tmp_path / "small"))
    assert entry | {"name": "mathvista", "label": "rl 2", "items": 2, "accuracy": 0.5} == entry
    (response,) = document["items"][0]["responses"]
    start, end = response["span"]  # in units of UTF-16, of which the face has two
    assert response["response"].encode("utf-16-le")[2 * start : 2 * end].decode("utf-16-le") == "B"
    assert (response["rule"], response["strict"]) == ("parentheses", True)
    assert document["items"][0]["subsets"] == {"skill": ["math"]}
    (missing,) = document["items"][1]["responses"]
    assert missing | {"response": "", "outcome": "no_answer", "span": None} == missing
    assert ["AP", 0.3] in document["metrics"]


def test_a_folder_of_an_evaluation_is_its_own_benchmark_also_before_its_report(tmp_path):
    write_benchmark(tmp_path / "eval", report=False)
    entry, document = open_benchmark(tmp_path / "eval")
    assert (entry["name"], entry["items"], entry["accuracy"]) == ("eval", None, None)
    assert len(document["items"]) == 2
    assert RunDocuments("r0", tmp_path / "eval", PictureStore(with_media=False), ()).build_entry()["kind"] == "eval"


def test_settings_of_stages_go_by_the_names_of_the_stages():
    settings = {"run": {"seed": 0}, "stages": [{"name": "cold", "steps": 3}, {"name": "rl", "steps": 9}]}
    paths = [path for path, _ in list_settings(settings)]
    assert paths == ["run.seed", "stages.cold.name", "stages.cold.steps", "stages.rl.name", "stages.rl.steps"]
