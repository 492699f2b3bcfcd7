"""The check that rollout engine and learner agree on log-probabilities."""

import math
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from config_samples import SMALL, write
from samplers import hf_sampler

from mmrl.config import diff_configs, flatten_settings, load_config
from mmrl.config.schema import LogprobCheckConfig
from mmrl.rollout.logprob_check import LogprobCheck
from mmrl.types import UserError

METRIC = "logprob_check/diff_mean"


def make_check(tiny, *, policy=None, sampler=None, warnings=None, **options):
    return LogprobCheck(
        sampler or tiny.sampler(),
        policy or tiny.policy,
        tiny.processor,
        samples=tiny.samples[:5],  # two with images, one of text alone, two with videos
        sampling_params=replace(tiny.params, temperature=0.7),
        options=LogprobCheckConfig(prompts_per_modality=1, **options),
        warn=([] if warnings is None else warnings).append,
    )


def test_same_weights_differ_only_by_rounding(make_tiny):
    warnings = []
    metrics = make_check(make_tiny(), warnings=warnings).measure(0)
    assert metrics.keys() == {METRIC, f"{METRIC}/text", f"{METRIC}/image", f"{METRIC}/video"}
    assert max(metrics.values()) < 1e-4 and not warnings


def test_other_weights_are_warned_of_or_stop_the_run(make_tiny):
    tiny, warnings = make_tiny(), []
    other = make_tiny().policy
    with torch.no_grad():
        other.model.get_input_embeddings().weight.mul_(1.5)
    metrics = make_check(tiny, policy=other, warnings=warnings, warn_above=1e-3, stop_above=100.0).measure(0)
    assert len(warnings) == 3 and "warn_above is 0.001" in warnings[0]
    with pytest.raises(UserError, match=r"rollout\.logprob_check\.stop_above"):
        make_check(tiny, policy=other, stop_above=min(metrics.values()) / 2).measure(0)


@pytest.mark.parametrize(
    ("every", "versions", "due"), [(3, range(1, 7), [3, 6]), (0, [3, 50], []), (None, [1, 49, 50, 51, 100], [50, 100])]
)
def test_check_is_due_every_so_many_versions(make_tiny, every, versions, due):
    check = make_check(make_tiny(), every=every)
    assert [version for version in versions if check.measure_if_due(version)] == due


@pytest.mark.parametrize("elsewhere", [3.0, math.nan])
def test_worst_rank_counts(make_tiny, elsewhere):
    """Each rank may have an engine of its own, and all ranks must end together."""
    check = make_check(make_tiny(), stop_above=2.0)
    two_ranks = replace(check, ranks=SimpleNamespace(all_gather=lambda own: [own, elsewhere]))
    with pytest.raises(UserError, match=f"rollout engine and learner differ by {elsewhere:.2g} nats per token"):
        two_ranks.measure(0)
    two_ranks = replace(check, ranks=SimpleNamespace(all_gather=lambda own: [own, 0.01]))
    assert list(two_ranks.measure(0).values()) == pytest.approx([0.01] * 4)


def test_check_follows_the_engines_routes(make_tiny):
    """Routers that choose other experts move log-probs without routes, and not with them."""
    tiny, measured = make_tiny("qwen3_vl_moe"), []
    engine = tiny.policy.frozen_copy()
    with torch.no_grad():
        for router in engine.routers:
            router.weight.copy_(router.weight.flip(0))
    for record_routes in (True, False):
        sampler = hf_sampler(engine, tiny.processor, record_routes=record_routes)
        check = make_check(tiny, sampler=sampler, warn_above=10.0, stop_above=20.0)
        measured.append(check.measure(0)[METRIC])
    assert measured[0] != measured[1] and min(measured) > 0


def test_resumed_run_may_check_more_often(tmp_path):
    path = write(tmp_path, SMALL)
    old = flatten_settings(load_config(path).config.model_dump(mode="json"))
    (change,) = diff_configs(old, load_config(path, ["rollout.logprob_check.every=1"]).config)
    assert (change.key, change.effect) == ("rollout.logprob_check.every", "no result depends on it")
