"""Rewards in worker processes: the same scores, and a call that hangs or dies costs only itself."""

import json
import os
import re
import signal
import subprocess
import sys
import time
from contextlib import closing
from functools import partial
from itertools import pairwise
from pathlib import Path
from unittest.mock import Mock

import pytest
from factories import make_sample
from scoring import GRAMMAR, as_read, check_samples, rollout
from waiting import alive, wait_for

from mmrl.config.schema import ScoringConfig, WorkerLimitsConfig
from mmrl.scoring import BoundTerm, RewardError, RewardFunctionScorer, RewardProcessError, registry
from mmrl.types import AnswerType, FailureKind, UserError
from mmrl.utils.processes import list_tree
from mmrl.utils.worker_pool import STOP_REQUESTED

REWARDS = '''
import ctypes
import os
import sys
import time

from mmrl.types import RewardValue, Unscorable
from mmrl_rewards.contract import reward


@reward(name="moody")
def moody(response, sample) -> RewardValue:
    """Does what it is told to."""
    match response.text.removeprefix("<answer>").removesuffix("</answer>"):
        case "hang":
            with open(__file__ + ".hung", "a") as log:
                log.write(f"{time.monotonic()}\\n")
            while True:
                time.sleep(0.01)
        case "think":
            time.sleep(1.0)
        case "think on":
            time.sleep(1.5)
        case "spin":
            while True:
                pass
        case "eat":
            hoard = []
            while len(hoard) < 200:
                hoard.append(b"x" * 2**24)
            time.sleep(600)
        case "multiply":
            for _ in range(200):
                if os.fork() == 0:
                    time.sleep(600)
            time.sleep(600)
        case "escape":
            if os.fork() == 0:
                os.setsid()
                if os.fork() == 0:
                    with open(__file__ + ".escaped", "w") as log:
                        log.write(str(os.getpid()))
                    time.sleep(600)
                os._exit(0)
            time.sleep(600)
        case "print":
            print("\x1b[2J\x9b31m" + "chatter " * 2**20, flush=True)
        case "exit":
            os._exit(3)
        case "crash":
            ctypes.string_at(0)
        case "raise":
            raise ValueError("as told")
        case "quit":
            sys.exit("as told")
        case "none":
            return None
        case "unscorable":
            raise Unscorable("as told")
    return RewardValue(len(response.text) % 7 / 7, f"length {len(response.text)}")


@reward(name="pid")
def pid(response, sample) -> RewardValue:
    """Says which process it runs in, and whether torch is in it."""
    return RewardValue(1.0, f"{os.getpid()} {'torch' in sys.modules} {os.environ.get('OMP_NUM_THREADS')}")


@reward(name="wary", timeout_s=2.0)
def wary(response, sample) -> RewardValue:
    """Declares that it may hang, and does."""
    return moody(response, sample)


@reward(name="slow start", timeout_s=2.0)
def slow_start(response, sample) -> float:
    """Its first call in a process takes longer than it may."""
    if "slow start" not in sys.modules:
        time.sleep(2.5)
        sys.modules["slow start"] = sys
    return 1.0
'''
FAILING = ["raise", "quit", "none", "unscorable"]


@pytest.fixture
def make_scorer(tmp_path):
    """Build a scorer of rewards in a file; its workers end with the test."""
    (tmp_path / "moody.py").write_text(REWARDS)
    scorers = []

    def make_scorer(*names, options=None, **scoring):
        terms = []
        for name in names:
            load = partial(registry.load_bound_reward, f"./moody.py:{name}", tmp_path, {})
            terms.append(BoundTerm(name=name, reward=load(), load_reward=load, options=as_read(options or {})))
        scorers.append(RewardFunctionScorer(terms, ScoringConfig(**{"on_error": "skip", "timeout_s": 60.0} | scoring)))
        return scorers[-1]

    yield make_scorer
    for scorer in scorers:
        scorer.close()


def text_sample(text, id="h"):
    return make_sample(text, AnswerType.TEXT, id=id, task="t")


def groups_of(texts, size=4):
    rollouts = [rollout(text, index=index % size) for index, text in enumerate(texts)]
    return [rollouts[start : start + size] for start in range(0, len(rollouts), size)]


def scores_and_failures(groups):
    return [(group.scores, [(dropped.rollout.text, dropped.failures) for dropped in group.dropped]) for group in groups]


@pytest.mark.parametrize("workers", [1, 3])
def test_workers_change_no_score_no_reason_no_order(make_scorer, workers):
    texts = [f"{'x' * (index % 11)}{index}" for index in range(200)]
    texts += ["", " ", "\ud800", "\x00\x1b", "é" * 100_000]
    here = make_scorer("moody", custom_rewards="main_process").score_groups(groups_of(texts + FAILING), step=0)
    there = make_scorer("moody", workers=workers).score_groups(groups_of(texts + FAILING), step=0)
    assert scores_and_failures(there) == scores_and_failures(here)
    assert sum(len(group.dropped) for group in here) == 4
    assert [r.text for group in there for r in group.rollouts] == texts


def test_a_call_that_hangs_or_dies_costs_itself_alone(make_scorer):
    scorer = make_scorer("moody", workers=2, timeout_s=2.0)
    texts = ["a", "hang", "b", "exit", "c", "spin", "d", "crash", *"efghijkl"]
    (group,) = scorer.score_groups(groups_of(texts, size=len(texts)), step=0)
    found = {dropped.rollout.text: dropped.failures["moody"] for dropped in group.dropped}
    kinds = {text: failure.kind for text, failure in found.items()}
    assert kinds == {"hang": "timeouts", "spin": "timeouts", "exit": "crashes", "crash": "crashes"}
    assert found["hang"].reason == "took more than 2 s"
    assert [r.text for r in group.rollouts] == [text for text in texts if len(text) == 1]
    assert len(scorer.score_groups(groups_of(["again"]), step=0)[0].scores) == 1


def test_a_call_beyond_a_limit_costs_itself_alone_and_leaves_nothing_behind(make_scorer):
    limits = WorkerLimitsConfig(memory_mib=512, processes=20)
    scorer = make_scorer("moody", timeout_s=60.0, worker_limits=limits)
    (group,) = scorer.score_groups(groups_of(["a", "eat", "b", "multiply", "c"], size=5), step=0)
    found = {dropped.rollout.text: dropped.failures["moody"] for dropped in group.dropped}
    assert {failure.kind for failure in found.values()} == {FailureKind.LIMIT}
    assert {text: failure.reason for text, failure in found.items()} == {
        "eat": "was stopped: its process held more than 512 MiB of memory (worker_limits.memory_mib)",
        "multiply": "was stopped: its process had more than 20 processes (worker_limits.processes)",
    }
    assert [r.text for r in group.rollouts] == ["a", "b", "c"]
    (server,) = [child for child in children(os.getpid()) if len(list_tree(child)) > 1]
    wait_for(lambda: len(list_tree(server)) <= 2)  # the server and its worker


def test_a_process_that_leaves_its_worker_ends_with_it(make_scorer, tmp_path):
    make_scorer("moody", timeout_s=3.0).score_groups(groups_of(["escape"]), step=0)
    escaped = int((tmp_path / "moody.py.escaped").read_text())
    wait_for(lambda: not alive(escaped))


def test_a_reward_that_eats_memory_at_its_first_call_is_named(make_scorer):
    scorer = make_scorer("moody", worker_limits=WorkerLimitsConfig(memory_mib=512))
    named = r"killed while calling reward 'moody' \(moody.py:\d+\) on sample 'h', .*: it held more than 512"
    with pytest.raises(RewardError, match=named):
        check_samples(scorer, [text_sample("eat")], GRAMMAR)


def test_output_is_escaped_and_bounded(make_scorer, capfd, monkeypatch):
    monkeypatch.setattr("mmrl.utils.worker_limits.MAX_OUTPUT_KIB", 1)
    scorer = make_scorer("moody")
    scorer.score_groups(groups_of(["print"] * 8), step=0)
    scorer.close()
    printed = capfd.readouterr()
    assert printed.out == ""
    assert printed.err.startswith(r"\u001b[2J\u009b31mchatter")
    assert len(printed.err) < 2000
    assert printed.err.count("warning: worker processes have printed more than 1 KiB") == 1
    assert re.search(r"worker processes printed 67,\d+,\d+ bytes that are not shown\n$", printed.err)


@pytest.mark.slow
def test_a_run_that_is_to_stop_waits_for_a_slow_reward_and_not_for_one_that_hangs(make_scorer, monkeypatch):
    scorer = make_scorer("moody")
    scorer.score_groups(groups_of(["think"], size=1), step=0)
    monkeypatch.setattr("mmrl.utils.worker_pool._STOP_PATIENCE_S", 0.2)
    STOP_REQUESTED.set()  # as the handler of Ctrl-C does
    try:
        (group,) = scorer.score_groups(groups_of(["think on"], size=1), step=0)
        assert len(group.scores) == 1
        start = time.monotonic()
        with pytest.raises(KeyboardInterrupt):
            scorer.score_groups(groups_of(["hang"], size=1), step=0)
        assert time.monotonic() - start < 30.0  # of 60
    finally:
        STOP_REQUESTED.clear()


def test_calls_that_hang_are_stopped_side_by_side(make_scorer, tmp_path):
    texts = ["hang" if index % 25 == 7 else "fine" for index in range(200)]
    scorer = make_scorer("moody", workers=4, timeout_s=2.0)
    scorer.score_groups(groups_of(["fine"]), step=0)
    groups = scorer.score_groups(groups_of(texts), step=0)
    begun = [float(line) for line in (tmp_path / "moody.py.hung").read_text().split()]
    assert len(begun) == 8
    assert min(later - one for one, later in pairwise(sorted(begun))) < 2.0  # one is not waited for by the next
    assert sum(len(group.dropped) for group in groups) == 8
    assert sum(len(group.scores) for group in groups) == 192


def test_the_deadline_of_a_term_wins_over_that_of_its_reward(make_scorer):
    scorer = make_scorer("wary", options={"timeout_s": 0.5}, timeout_s=100.0, custom_rewards="main_process")
    (group,) = scorer.score_groups(groups_of(["hang", "fine"]), step=0)
    assert [dropped.failures["wary"].reason for dropped in group.dropped] == ["took more than 0.5 s"]


@pytest.mark.parametrize(
    ("options", "scoring", "elsewhere"),
    [
        ({"timeout_s": 5.0}, {"custom_rewards": "main_process"}, True),
        ({}, {}, True),
        ({}, {"custom_rewards": "main_process"}, False),
    ],
)
def test_a_deadline_or_a_function_of_the_users_needs_a_process(make_scorer, options, scoring, elsewhere):
    (group,) = make_scorer("pid", options=options, **scoring).score_groups(groups_of(["x"]), step=0)
    assert (group.scores[0].terms["pid"].reason.split()[0] != str(os.getpid())) is elsewhere


@pytest.mark.slow
def test_an_answer_that_makes_a_verifier_hang_costs_its_deadline():
    load = partial(registry.load_bound_reward, "schema:valid", Path(), {"schema": {"pattern": "^(a|aa)+$"}})
    term = BoundTerm(name="v", reward=load(), load_reward=load, options=as_read({"timeout_s": 2.0}))
    sample = make_sample("aa", AnswerType.JSON)
    with closing(RewardFunctionScorer([term], ScoringConfig())) as scorer:
        check_samples(scorer, [sample], GRAMMAR)
        answers = ('"aaa"', f'"{"a" * 60}b"', '"aaa"')
        (group,) = scorer.score_groups([[rollout(f"<answer>{answer}</answer>", sample) for answer in answers]], step=0)
    assert group.totals == (1.0, 1.0)
    assert [dropped.failures["v"].kind for dropped in group.dropped] == [FailureKind.TIMEOUT]


def test_workers_are_other_processes_without_torch_and_with_one_thread_each(make_scorer):
    assert "torch" in sys.modules
    groups = make_scorer("pid", workers=2).score_groups(groups_of(["x"] * 64), step=0)
    facts = {score.terms["pid"].reason.split(" ", 1)[1] for group in groups for score in group.scores}
    pids = {score.terms["pid"].reason.split()[0] for group in groups for score in group.scores}
    assert facts == {"False 1"}
    assert str(os.getpid()) not in pids
    assert 1 <= len(pids) <= 2


def test_what_a_first_call_loads_does_not_count_against_its_deadline(make_scorer):
    scorer = make_scorer("slow_start")
    check_samples(scorer, [make_sample()], GRAMMAR)
    assert scorer.score_groups(groups_of(["x", "y"]), step=0)[0].totals == (1.0, 1.0)


@pytest.mark.parametrize(
    ("target", "fault"),
    [("hang", "took more than 2 s"), ("exit", "its process died"), ("eat", "was stopped: its process held more than")],
)
def test_the_trial_ends_with_the_first_call_whose_worker_is_lost(make_scorer, tmp_path, target, fault):
    deadline_s = 2.0 if target == "hang" else 60.0
    scorer = make_scorer("moody", timeout_s=deadline_s, worker_limits=WorkerLimitsConfig(memory_mib=512))
    check_samples(scorer, [text_sample("fine")] * 2, GRAMMAR)
    tried = iter([text_sample(target, f"bad {number}") for number in range(50)])
    where = re.escape("reward 'moody' on sample 'bad 0' (task 't')")
    response, remedy = f"response: '<answer>{target}</answer>'", r"fix the reward \(moody.py:\d+\)"
    with pytest.raises(RewardProcessError, match=f"{where}: {fault}.*; {response}.*{remedy}"):
        check_samples(scorer, tried, GRAMMAR)
    assert len(list(tried)) >= 48
    if target == "hang":
        assert len((tmp_path / "moody.py.hung").read_text().split()) == 1


def test_a_reward_that_hangs_at_its_first_call_is_named(make_scorer, monkeypatch):
    monkeypatch.setattr("mmrl.scoring.reward_workers.FIRST_CALL_TIMEOUT_S", 5.0)
    named = r"hung while calling reward 'wary' \(moody.py:\d+\) on sample 'h', response '<answer>hang</answer>'"
    with pytest.raises(RewardError, match=f"{named}: more than 5 s"):
        check_samples(make_scorer("wary"), [text_sample("hang")], GRAMMAR)


@pytest.mark.slow
def test_a_first_call_may_take_as_long_as_its_term_says(make_scorer, monkeypatch):
    monkeypatch.setattr("mmrl.scoring.reward_workers.FIRST_CALL_TIMEOUT_S", 0.5)
    check_samples(make_scorer("moody", options={"timeout_s": 60.0}), [text_sample("think")], GRAMMAR)
    with pytest.raises(RewardProcessError, match="more than 1 s"):
        check_samples(make_scorer("moody", options={"timeout_s": 1.0}), [text_sample("hang")], GRAMMAR)


def test_a_row_of_a_case_table_that_hangs_is_named(make_scorer, tmp_path, monkeypatch):
    make_scorer("moody")
    row = {"fn": "./moody.py:wary", "sample": {"answer_type": "text", "value": "x"}, "expected": 0, "source": "none"}
    rows = [row | {"response": "fine", "expected": 4 / 7}, row | {"response": "hang"}]
    (tmp_path / "moody.json").write_text(json.dumps(rows))
    named = r"reward './moody.py:wary' \(moody.py:\d+\), the row of its case table with the response 'hang': .* 2 s"
    # The reward's own deadline holds, not that of the config or of a first call.
    with pytest.raises(UserError, match=named):
        registry.check_case_tables(["./moody.py:wary"], tmp_path, ScoringConfig(timeout_s=300.0))


def test_a_reward_that_does_not_load_elsewhere_is_named(make_scorer, tmp_path):
    scorer = make_scorer("moody", workers=1)
    (tmp_path / "moody.py").write_text("raise RuntimeError('no longer there')")
    with pytest.raises(RewardError, match="a process for rewards died while loading reward 'moody'"):
        scorer.score_groups(groups_of(["x"]), step=0)


def test_a_sample_that_cannot_be_sent_is_named(make_scorer):
    sample = make_sample(id="odd", meta={"f": lambda: 0})
    scorer = make_scorer("moody", workers=1)
    with pytest.raises(UserError, match="cannot send samples odd to a worker process"):
        scorer.score_groups([[rollout("x", sample)]], step=0)
    assert scorer.score_groups(groups_of(["x"]), step=0)[0].totals == (1 / 7,)


def children(pid):
    return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


@pytest.mark.skipif(not Path("/proc/self/task").exists(), reason="reads Linux's /proc")
def test_no_process_outlives_the_scorer(make_scorer):
    scorer = make_scorer("pid", workers=2)
    groups = scorer.score_groups(groups_of(["x"] * 64), step=0)
    pids = {int(score.terms["pid"].reason.split()[0]) for group in groups for score in group.scores}
    assert all(alive(pid) for pid in pids)
    scorer.close()
    wait_for(lambda: not any(alive(pid) for pid in pids))


@pytest.mark.skipif(not Path("/proc/self/task").exists(), reason="reads Linux's /proc")
@pytest.mark.parametrize("with_its_group", [False, True])
def test_no_process_outlives_a_run_that_is_killed_in_the_middle_of_a_call(make_scorer, tmp_path, with_its_group):
    script = tmp_path / "run.py"
    script.write_text(f"""
import sys
sys.path.insert(0, {str(Path(__file__).parents[2] / "helpers")!r})
from functools import partial
from pathlib import Path
from scoring import as_read, rollout
from mmrl.scoring import registry
from mmrl.config.schema import ScoringConfig
from mmrl.scoring import BoundTerm, RewardFunctionScorer

if __name__ == "__main__":
    load = partial(registry.load_bound_reward, "./moody.py:moody", Path({str(tmp_path)!r}), {{}})
    term = BoundTerm(name="moody", reward=load(), load_reward=load, options=as_read({{}}))
    scorer = RewardFunctionScorer([term], ScoringConfig(workers=1, timeout_s=100.0))
    scorer.score_groups([[rollout("fine")]], step=0)
    print("ready", flush=True)
    scorer.score_groups([[rollout("hang")]], step=0)
""")
    (tmp_path / "moody.py").write_text(REWARDS)
    # The launcher of ranks kills the group of one that does not end.
    with subprocess.Popen([sys.executable, script], stdout=subprocess.PIPE, text=True, start_new_session=True) as run:
        assert run.stdout.readline() == "ready\n"
        below = [child for server in children(run.pid) for child in (server, *children(server))]
        assert len(below) >= 2
        time.sleep(0.5)
        if with_its_group:
            os.killpg(run.pid, signal.SIGKILL)
        else:
            run.kill()
    wait_for(lambda: not any(alive(pid) for pid in below))


def test_a_scorer_that_was_interrupted_starts_new_workers(make_scorer, monkeypatch):
    scorer = make_scorer("moody", workers=1)
    scorer.score_groups(groups_of(["fine"]), step=0)
    with monkeypatch.context() as patched, pytest.raises(KeyboardInterrupt):
        patched.setattr("mmrl.scoring.reward_workers._read_outcomes", Mock(side_effect=KeyboardInterrupt))
        scorer.score_groups(groups_of(["x"]), step=0)
    assert scorer.score_groups(groups_of(["fine"]), step=0)[0].totals == (4 / 7,)
