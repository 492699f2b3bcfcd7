"""Rewards in worker processes: the same scores, and calls that hang or die cost nothing but themselves."""

import os
import re
import signal
import subprocess
import sys
import time
from contextlib import closing
from dataclasses import replace
from functools import partial
from itertools import pairwise
from pathlib import Path

import pytest
from scoring import GRAMMAR, as_read, rollout
from waiting import wait_for

from mmrl.config.schema import ScoringConfig, WorkerLimitsConfig
from mmrl.scoring import BoundTerm, RewardError, RewardFunctionScorer, RewardProcessError, registry
from mmrl.types import AnswerType, RewardErrorKind, Sample, Target, UserError
from mmrl.utils.processes import list_tree
from mmrl.utils.worker_pool import STOP_REQUESTED
from mmrl_rewards.contract import reward

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
            time.sleep(2.5)
        case "think on":
            time.sleep(5.0)
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
OFTEN = ["hang", "exit", "crash", "raise", "quit", "none", "unscorable"]


@pytest.fixture
def make_scorer(tmp_path):
    """Builds a judge of rewards in a file; its workers end with the test."""
    (tmp_path / "moody.py").write_text(REWARDS)
    judges = []

    def make_scorer(*names, options=None, **judging):
        loads = [partial(registry.load_bound_reward, f"./moody.py:{name}", tmp_path, {}) for name in names]
        bound = [
            BoundTerm(name=name, reward=load(), load_reward=load, options=as_read(options or {}))
            for name, load in zip(names, loads, strict=True)
        ]
        judges.append(RewardFunctionScorer(bound, ScoringConfig(**{"on_error": "skip", "timeout_s": 60.0} | judging)))
        return judges[-1]

    yield make_scorer
    for judge in judges:
        judge.close()


def groups_of(texts, size=4):
    rollouts = [rollout(text, index=index % size) for index, text in enumerate(texts)]
    return [rollouts[start : start + size] for start in range(0, len(rollouts), size)]


def shown(groups):
    return [
        (group.scores, [(skip.rollout.text, skip.failures) for skip in group.dropped], len(group.rollouts))
        for group in groups
    ]


@pytest.mark.parametrize("workers", [1, 3])
def test_workers_change_no_score_no_reason_no_order(make_scorer, workers):
    texts = [f"{'x' * (index % 11)}{index}" for index in range(200)] + ["raise", "quit", "none", "unscorable"]
    texts += ["", " ", "\ud800", "\x00\x1b", "é" * 100_000]
    here = make_scorer("moody", custom_rewards="main_process").score_groups(groups_of(texts), step=0)
    there = make_scorer("moody", workers=workers).score_groups(groups_of(texts), step=0)
    assert shown(there) == shown(here)
    assert sum(len(group.dropped) for group in here) == 4
    assert [r.text for group in there for r in group.all_rollouts if r.text not in OFTEN] == texts[:200] + texts[204:]


def test_a_call_that_hangs_or_dies_costs_itself_alone(make_scorer):
    judge = make_scorer("moody", workers=2, timeout_s=2.0)
    texts = ["a", "hang", "b", "exit", "c", "spin", "d", "crash", *"efghijkl"]
    (group,) = judge.score_groups(groups_of(texts, size=len(texts)), step=0)
    found = {skip.rollout.text: skip.failures["moody"] for skip in group.dropped}
    assert {text: failure.error_kind for text, failure in found.items()} == {
        "hang": RewardErrorKind.TIMEOUT,
        "spin": RewardErrorKind.TIMEOUT,
        "exit": RewardErrorKind.CRASH,
        "crash": RewardErrorKind.CRASH,
    }
    assert found["hang"].reason == "took more than 2 s"
    assert [r.text for r in group.rollouts] == [text for text in texts if len(text) == 1]
    assert len(judge.score_groups(groups_of(["again"]), step=0)[0].scores) == 1


def test_a_call_beyond_a_limit_costs_itself_alone_and_leaves_nothing_behind(make_scorer):
    limits = WorkerLimitsConfig(memory_mib=512, processes=20)
    judge = make_scorer("moody", timeout_s=60.0, worker_limits=limits)
    (group,) = judge.score_groups(groups_of(["a", "eat", "b", "multiply", "c"], size=5), step=0)
    found = {skip.rollout.text: skip.failures["moody"] for skip in group.dropped}
    assert {failure.error_kind for failure in found.values()} == {RewardErrorKind.LIMIT}
    assert {text: failure.reason for text, failure in found.items()} == {
        "eat": "was stopped: its process held more than 512 MiB of memory (worker_limits.memory_mib)",
        "multiply": "was stopped: its process had more than 20 processes (worker_limits.processes)",
    }
    assert [r.text for r in group.rollouts] == ["a", "b", "c"]
    (server,) = [child for child in children(os.getpid()) if len(list_tree(child)) > 1]
    wait_for(lambda: len(list_tree(server)) <= 2)  # the server and its worker


def test_what_leaves_a_worker_ends_with_it(make_scorer, tmp_path):
    make_scorer("moody", timeout_s=3.0).score_groups(groups_of(["escape"]), step=0)
    escaped = int((tmp_path / "moody.py.escaped").read_text())
    wait_for(lambda: not alive(escaped))


def test_a_reward_that_eats_memory_at_its_first_call_is_named(make_scorer):
    sample = Sample(id="h", task="t", parts=("?",), target=Target(answer_type=AnswerType.TEXT, value="eat"))
    judge = make_scorer("moody", worker_limits=WorkerLimitsConfig(memory_mib=512))
    with pytest.raises(
        RewardError, match="killed while calling reward 'moody' on sample 'h', response .*: it held more than 512"
    ):
        judge.check_samples([sample], GRAMMAR)


def test_output_is_escaped_and_bounded(make_scorer, capfd, monkeypatch):
    monkeypatch.setattr("mmrl.utils.worker_limits.MAX_OUTPUT_KIB", 1)
    judge = make_scorer("moody")
    judge.score_groups(groups_of(["print"] * 8), step=0)
    judge.close()
    printed = capfd.readouterr()
    assert printed.out == ""
    assert printed.err.startswith(r"\u001b[2J\u009b31mchatter")
    assert len(printed.err) < 2000
    assert printed.err.count("warning: worker processes have printed more than 1 KiB") == 1
    assert re.search(r"worker processes printed 67,\d+,\d+ bytes that are not shown\n$", printed.err)


def test_a_slow_reward_is_waited_for_once_the_run_is_to_stop_and_one_that_hangs_is_not(make_scorer):
    judge = make_scorer("moody")
    judge.score_groups(groups_of(["think"], size=1), step=0)
    STOP_REQUESTED.set()  # as the handler of Ctrl-C does
    try:
        (group,) = judge.score_groups(groups_of(["think on"], size=1), step=0)
        assert len(group.scores) == 1
        start = time.monotonic()
        with pytest.raises(KeyboardInterrupt):
            judge.score_groups(groups_of(["hang"], size=1), step=0)
        assert time.monotonic() - start < 30.0  # of 60
    finally:
        STOP_REQUESTED.clear()


def test_many_hangers_are_stopped_side_by_side(make_scorer, tmp_path):
    texts = ["hang" if index % 25 == 7 else "fine" for index in range(200)]
    judge = make_scorer("moody", workers=4, timeout_s=2.0)
    judge.score_groups(groups_of(["fine"]), step=0)
    groups = judge.score_groups(groups_of(texts), step=0)
    begun = [float(line) for line in (tmp_path / "moody.py.hung").read_text().split()]
    assert len(begun) == 8
    assert min(later - one for one, later in pairwise(sorted(begun))) < 2.0  # one is not waited for by the next
    assert sum(len(group.dropped) for group in groups) == 8
    assert sum(len(group.scores) for group in groups) == 192


def test_what_has_a_deadline_never_runs_in_this_process(make_scorer):
    (group,) = make_scorer("wary").score_groups(groups_of(["hang", "fine"]), step=0)
    assert [list(skip.failures) for skip in group.dropped] == [["wary"]]
    in_process = {"custom_rewards": "main_process"}
    for options, judging, elsewhere in (({"timeout_s": 5.0}, {}, True), ({}, {}, True), ({}, in_process, False)):
        (group,) = make_scorer("pid", options=options, **judging).score_groups(groups_of(["x"]), step=0)
        assert (group.scores[0].terms["pid"].reason.split()[0] != str(os.getpid())) is elsewhere


@pytest.mark.parametrize(
    ("fn", "args", "target", "hanging", "right"),
    [
        ("mmrl_rewards.maths:equal", {}, Target(answer_type=AnswerType.LATEX, value="x+1"), "9^{9^{9^{9}}}", "1+x"),
        (
            *("mmrl_rewards.schema:valid", {"schema": {"pattern": "^(a|aa)+$"}}),
            *(Target(answer_type=AnswerType.JSON, value="aa"), f'"{"a" * 60}b"', '"aaa"'),
        ),
    ],
)
def test_what_is_made_to_hang_a_verifier_costs_its_deadline(fn, args, target, hanging, right):
    sample = Sample(id="h", task="t", parts=("?",), target=target)
    load = partial(registry.load_bound_reward, fn, Path(), args)
    with closing(
        RewardFunctionScorer(
            [BoundTerm(name="v", reward=load(), load_reward=load, options=as_read({"timeout_s": 4.0}))],
            ScoringConfig(),
        )
    ) as judge:
        judge.check_samples([sample], GRAMMAR)
        answers = (right, hanging, right)
        (group,) = judge.score_groups([[rollout(f"<answer>{answer}</answer>", sample) for answer in answers]], step=0)
    assert group.totals == (1.0, 1.0)
    assert [skip.failures["v"].error_kind for skip in group.dropped] == [RewardErrorKind.TIMEOUT]


def test_a_terms_deadline_wins_over_the_rewards(make_scorer):
    (group,) = make_scorer("wary", options={"timeout_s": 3.0}, timeout_s=100.0).score_groups(
        groups_of(["hang"]), step=0
    )
    assert group.dropped[0].failures["wary"].reason == "took more than 3 s"


def test_workers_are_other_processes_without_torch_and_with_one_thread_each(make_scorer):
    torch = pytest.importorskip("torch")
    assert torch.__name__ in sys.modules
    groups = make_scorer("pid", workers=2).score_groups(groups_of(["x"] * 64), step=0)
    said = {score.terms["pid"].reason.split(" ", 1)[1] for group in groups for score in group.scores}
    pids = {score.terms["pid"].reason.split()[0] for group in groups for score in group.scores}
    assert said == {"False 1"}
    assert str(os.getpid()) not in pids
    assert 1 <= len(pids) <= 2


def test_what_a_first_call_loads_is_no_reason_to_stop_it(make_scorer):
    sample = Sample(id="s", task="t", parts=("?",), target=Target(answer_type=AnswerType.NUMBER, value=3))
    judge = make_scorer("slow_start")
    judge.check_samples([sample], GRAMMAR)
    assert judge.score_groups(groups_of(["x", "y"]), step=0)[0].totals == (1.0, 1.0)


def test_a_reward_that_hangs_on_the_right_answer_stops_the_run_before_it_begins(make_scorer):
    fine = Sample(id="f", task="t", parts=("?",), target=Target(answer_type=AnswerType.TEXT, value="fine"))
    judge = make_scorer("wary")
    judge.check_samples([fine], GRAMMAR)
    with pytest.raises(RewardError, match=r"reward 'wary' on sample 'h' \(task 't'\): took more than 2 s"):
        judge.check_samples(
            [fine, replace(fine, id="h", target=Target(answer_type=AnswerType.TEXT, value="hang"))], GRAMMAR
        )


@pytest.mark.parametrize(
    ("target", "fault"),
    [("hang", "took more than 2 s"), ("exit", "its process died"), ("eat", "was stopped: its process held more than")],
)
def test_the_trial_ends_with_the_first_call_whose_worker_is_lost(make_scorer, tmp_path, target, fault):
    fine = Sample(id="f", task="t", parts=("?",), target=Target(answer_type=AnswerType.TEXT, value="fine"))
    bad = replace(fine, target=Target(answer_type=AnswerType.TEXT, value=target))
    deadline_s = 2.0 if target == "hang" else 60.0
    judge = make_scorer("moody", timeout_s=deadline_s, worker_limits=WorkerLimitsConfig(memory_mib=512))
    judge.check_samples([fine] * 2, GRAMMAR)
    tried = iter([replace(bad, id=f"bad {number}") for number in range(50)])
    where = re.escape("reward 'moody' on sample 'bad 0' (task 't')")
    with pytest.raises(RewardProcessError, match=f"{where}: {fault}.*; response: '<answer>{target}</answer>'"):
        judge.check_samples(tried, GRAMMAR)
    assert len(list(tried)) >= 48
    if target == "hang":
        assert len((tmp_path / "moody.py.hung").read_text().split()) == 1


def test_a_reward_that_hangs_at_its_first_call_is_named(make_scorer, monkeypatch):
    monkeypatch.setattr("mmrl.scoring.terms.STARTUP_TIMEOUT_S", 4.0)
    sample = Sample(id="h", task="t", parts=("?",), target=Target(answer_type=AnswerType.TEXT, value="hang"))
    named = "hung while calling reward 'wary' on sample 'h', response '<answer>hang</answer>': more than 4 s"
    with pytest.raises(RewardError, match=named):
        make_scorer("wary").check_samples([sample], GRAMMAR)


def test_a_reward_that_does_not_load_elsewhere_is_named(make_scorer, tmp_path):
    judge = make_scorer("moody", workers=1)
    (tmp_path / "moody.py").write_text("raise RuntimeError('no longer there')")
    with pytest.raises(RewardError, match="a process for rewards died while loading reward 'moody'"):
        judge.score_groups(groups_of(["x"]), step=0)


def test_a_sample_that_cannot_be_sent_is_named(make_scorer):
    sample = Sample(
        id="odd", task="t", parts=("?",), target=Target(answer_type=AnswerType.NUMBER, value=3), meta={"f": lambda: 0}
    )
    judge = make_scorer("moody", workers=1)
    with pytest.raises(UserError, match="cannot send samples odd to a worker process"):
        judge.score_groups([[rollout("x", sample)]], step=0)
    assert judge.score_groups(groups_of(["x"]), step=0)[0].totals == (1 / 7,)


def children(pid):
    return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


@pytest.mark.skipif(not Path("/proc/self/task").exists(), reason="reads Linux's /proc")
def test_no_process_outlives_the_judge(make_scorer):
    judge = make_scorer("pid", workers=2)
    groups = judge.score_groups(groups_of(["x"] * 64), step=0)
    pids = {int(score.terms["pid"].reason.split()[0]) for group in groups for score in group.scores}
    assert all(alive(pid) for pid in pids)
    judge.close()
    wait_for(lambda: not any(alive(pid) for pid in pids))


@pytest.mark.skipif(not Path("/proc/self/task").exists(), reason="reads Linux's /proc")
@pytest.mark.parametrize("with_its_group", [False, True])
def test_no_process_outlives_a_run_that_is_killed_in_the_middle_of_a_call(make_scorer, tmp_path, with_its_group):
    script = tmp_path / "run.py"
    script.write_text(f"""
import sys
sys.path.insert(0, {str(Path(__file__).parents[2])!r})
from functools import partial
from pathlib import Path
from scoring import as_read, rollout
from mmrl.scoring import registry
from mmrl.config.schema import ScoringConfig
from mmrl.scoring import BoundTerm, RewardFunctionScorer

if __name__ == "__main__":
    load = partial(registry.load_bound_reward, "./moody.py:moody", Path({str(tmp_path)!r}), {{}})
    term = BoundTerm(name="moody", reward=load(), load_reward=load, options=as_read({{}}))
    judge = RewardFunctionScorer([term], ScoringConfig(workers=1, timeout_s=100.0))
    judge.score_groups([[rollout("fine")]], step=0)
    print("ready", flush=True)
    judge.score_groups([[rollout("hang")]], step=0)
""")
    (tmp_path / "moody.py").write_text(REWARDS)
    # The launcher of ranks kills the group of one that does not end.
    with subprocess.Popen([sys.executable, script], stdout=subprocess.PIPE, text=True, start_new_session=True) as run:
        assert run.stdout.readline() == "ready\n"
        below = [child for nurse in children(run.pid) for child in (nurse, *children(nurse))]
        assert len(below) >= 2
        time.sleep(0.5)
        if with_its_group:
            os.killpg(run.pid, signal.SIGKILL)
        else:
            run.kill()
    wait_for(lambda: not any(alive(pid) for pid in below))


def alive(pid):
    stat = Path(f"/proc/{pid}/stat")
    return stat.exists() and stat.read_text().rsplit(")", 1)[1].split()[0] != "Z"


def test_an_interruption_ends_the_workers_and_the_judge_can_go_on(make_scorer, monkeypatch):
    judge = make_scorer("moody", workers=1)
    judge.score_groups(groups_of(["fine"]), step=0)
    with monkeypatch.context() as patched, pytest.raises(KeyboardInterrupt):
        patched.setattr("mmrl.scoring.scorer._read_outcomes", interrupted)
        judge.score_groups(groups_of(["x"]), step=0)
    assert judge.score_groups(groups_of(["fine"]), step=0)[0].totals == (4 / 7,)


def interrupted(futures, calls):
    raise KeyboardInterrupt


@pytest.mark.parametrize("timeout_s", [0.0, -1.0, float("inf"), float("nan")])
def test_a_deadline_is_a_number_of_seconds(timeout_s):
    with pytest.raises(UserError, match=f"reward 'x': timeout_s {timeout_s} is not a number of seconds above 0"):
        reward(name="x", timeout_s=timeout_s)
