"""Routers that record and replay routes: against those of transformers, with gradients, recomputation and metrics."""

import copy
import math

import pytest
import torch
from learning import make_experiences, make_learner

from mmrl.policy.expert_routing import find_routers, get_routes, set_routes, sum_routing, summarize_routing
from mmrl.policy.policy import PolicyModel
from mmrl.types import UserError

FAMILIES = ("qwen3_vl_moe", "qwen3_5_moe")


def logits(model, ids):
    return model(input_ids=ids, mm_token_type_ids=torch.zeros_like(ids), use_cache=False).logits


def gradient(model, ids):
    model.zero_grad()
    logits(model, ids).log_softmax(-1)[..., ::5].sum().backward()
    return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


@pytest.fixture
def ids():
    return torch.randint(20, 300, (2, 30), generator=torch.Generator().manual_seed(0))


@pytest.mark.parametrize("family", FAMILIES)
def test_a_router_chooses_the_experts_that_transformers_chooses(make_tiny, family, ids):
    model = make_tiny(family).policy.model
    plain = copy.deepcopy(model)
    for router in find_routers(plain):
        del router.forward
    assert torch.equal(logits(model, ids), logits(plain, ids))
    ours, theirs = gradient(model, ids), gradient(plain, ids)
    assert all(torch.equal(ours[name], theirs[name]) for name in theirs)


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("recompute", [False, True])
def test_replayed_routes_survive_an_update_and_the_router_learns(make_tiny, family, ids, recompute):
    model = make_tiny(family).policy.model.train()
    if recompute:
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    logits(model, ids)
    routes = get_routes(find_routers(model))
    assert routes.shape == (2, ids.numel(), 2)
    with torch.no_grad():
        for router in find_routers(model):
            router.weight.add_(torch.randn(router.weight.shape, generator=torch.Generator().manual_seed(1)))
    logits(model, ids)
    assert not torch.equal(get_routes(find_routers(model)), routes)
    set_routes(find_routers(model), routes)
    found = gradient(model, ids)
    assert torch.equal(get_routes(find_routers(model)), routes)
    assert all(found[name].norm() > 0 for name in found if name.endswith("mlp.gate.weight"))
    set_routes(find_routers(model), None)
    logits(model, ids)
    assert not torch.equal(get_routes(find_routers(model)), routes)


def test_a_copy_of_a_model_has_routers_of_its_own(make_tiny, ids):
    model = make_tiny("qwen3_vl_moe").policy.model
    with torch.no_grad():
        logits(model, ids)
    other = copy.deepcopy(model)
    set_routes(find_routers(model), get_routes(find_routers(model)).flip(-1))
    assert all(router.replayed_routes is None for router in find_routers(other))


def summary_of(model, tokens):
    routers = find_routers(model)
    return summarize_routing(routers, sum_routing(routers, torch.tensor(tokens)))


def test_the_summary_counts_tokens_and_distances(make_tiny, ids):
    model = make_tiny("qwen3_vl_moe").policy.model
    with torch.no_grad():
        for router in find_routers(model):
            router.weight.zero_()
    logits(model, ids)
    # Of equal probabilities, the router takes the first two of four experts for every token.
    summary = summary_of(model, range(ids.numel()))
    assert summary.load_entropy == pytest.approx(math.log(2) / math.log(4))
    assert summary.margin == pytest.approx(0.0)
    routes = torch.tensor([[0, 1], [2, 3]]).repeat(ids.numel() // 2, 1).expand(2, -1, -1)
    set_routes(find_routers(model), routes)
    logits(model, ids)
    assert summary_of(model, [0, 1]).load_entropy == pytest.approx(1.0)
    assert summary_of(model, [0, 2]).load_entropy == pytest.approx(math.log(2) / math.log(4))
    shares = torch.tensor([1, 1, 3, 3]) / 8  # a token that is named twice counts twice
    assert summary_of(model, [0, 1, 3, 3]).load_entropy == pytest.approx(
        float(torch.special.entr(shares).sum()) / math.log(4)
    )


def test_the_margin_lies_between_the_last_expert_that_is_picked_and_the_first_that_is_not(make_tiny, ids):
    model = make_tiny("qwen3_vl_moe").policy.model
    seen = []
    for router in find_routers(model):
        router.register_forward_hook(lambda router, given, made: seen.append(made[0].detach().softmax(-1)))
    logits(model, ids)
    expected = torch.stack([layer.sort(descending=True).values for layer in seen])[:, 1:4]
    assert summary_of(model, [1, 2, 3]).margin == pytest.approx(float((expected[..., 1] - expected[..., 2]).mean()))


@pytest.mark.parametrize("family", FAMILIES)
def test_a_frozen_router_stays_and_the_experts_learn(make_tiny, family):
    policy = PolicyModel(make_tiny(family).policy.model, freeze_router=True)
    trained = policy.trainable
    assert not [name for name in trained if name.endswith((".gate.weight", "shared_expert_gate.weight"))]
    assert [name for name in trained if name.endswith("experts.gate_up_proj")]


def test_a_model_without_experts_has_no_router_to_freeze(make_tiny):
    with pytest.raises(UserError, match="model.freeze_router: this qwen2_5_vl has no experts; leave it out"):
        PolicyModel(make_tiny().policy.model, freeze_router=True)


@pytest.mark.parametrize(("epochs", "mini_batches"), [(2, 1), (1, 3), (2, 2)])
@pytest.mark.parametrize("routing_replay", ["learner", "none"])
def test_updates_of_a_step_replay_the_routes_of_its_start(make_tiny, monkeypatch, routing_replay, epochs, mini_batches):
    tiny = make_tiny("qwen3_vl_moe")
    experiences, start = make_experiences(tiny), tiny.policy.frozen_copy()
    as_at_the_start = []
    score = PolicyModel.compute_logprobs

    def watched(policy, batch, routes_XTK=None):
        scores = score(policy, batch, routes_XTK)
        if torch.is_grad_enabled():
            with torch.no_grad():
                score(start, batch)
            as_at_the_start.append(torch.equal(get_routes(policy.routers), get_routes(start.routers)))
        return scores

    monkeypatch.setattr(PolicyModel, "compute_logprobs", watched)
    options = {"lr": 0.05, "ppo_epochs": epochs, "num_mini_batches": mini_batches, "shared_prefix": False}
    metrics = make_learner(tiny, routing_replay=routing_replay, **options).step(experiences, step=0)
    assert len(as_at_the_start) >= epochs * mini_batches
    assert all(as_at_the_start) == (routing_replay == "learner")
    assert 0 < metrics["policy/router_load_entropy"] <= 1
    assert 0 < metrics["policy/router_margin"] < 1


@pytest.mark.parametrize("routing_replay", ["none", "learner"])
def test_metrics_of_routers_do_not_depend_on_layouts_or_micro_batches(make_tiny, routing_replay):
    found = []
    for options in ({"micro_batch_groups": 1}, {"micro_batch_groups": 3}, {"shared_prefix": False}):
        tiny = make_tiny("qwen3_5_moe")
        metrics = make_learner(tiny, lr=1e-6, routing_replay=routing_replay, **options).step(
            make_experiences(tiny), step=0
        )
        found.append([metrics["policy/router_load_entropy"], metrics["policy/router_margin"]])
    assert found[0] == pytest.approx(found[1], rel=1e-5)
    assert found[0] == pytest.approx(found[2], rel=1e-5)
    assert "policy/router_margin" not in make_learner(make_tiny()).step(make_experiences(make_tiny()), step=0)
