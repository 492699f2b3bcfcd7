"""Each place that sends a tensor to the device is needed: without it, the pretended device raises or waits."""

import ast
import importlib
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

import pytest
import torch
from learning import KeepGradients, make_learner, make_off_policy_experiences
from processors import pad_prompts
from samplers import hf_sampler

import mmrl
from mmrl.policy.decode_cache import DecodeCache
from mmrl.policy.gated_delta_net import plan_fork
from mmrl.policy.policy import PolicyModel
from mmrl.policy.shared_prefix_attention import build_block_mask
from mmrl.rollout.responses import StopStringMatcher
from mmrl.types import Experience

ROOT = Path(mmrl.__file__).parent.parent
SENDERS = ("send", "send_numbers")
# What `_join_pieces` sends is read by flash-linear-attention's kernel alone.
UNREACHED = {"_join_pieces"}
MODULES = {
    "micro-batch": (
        "mmrl.policy.batch",
        "mmrl.policy.expert_routing",
        "mmrl.policy.gated_delta_net",
        "mmrl.policy.policy",
        "mmrl.policy.shared_prefix_attention",
        "mmrl.policy.vision_attention",
    ),
    "update": ("mmrl.learner.tokens", "mmrl.learner.optimizer_torch"),
    "sampler": ("mmrl.rollout.engines.hf",),
    "cache": ("mmrl.policy.decode_cache",),
}


class Call(NamedTuple):
    """A call of `send` or `send_numbers`."""

    module: str
    function: str
    sender: str
    lines: range


def iter_senders() -> Iterator[tuple[str, ast.Module]]:
    """Yield name and content of each module that sends tensors."""
    for path in sorted((ROOT / "mmrl").rglob("*.py")):
        text = path.read_text(encoding="utf-8")
        if "mmrl.utils.torch_transfer import" in text:
            yield ".".join(path.relative_to(ROOT).with_suffix("").parts), ast.parse(text)


def find_calls(*modules: str) -> list[Call]:
    calls = []
    for module, content in iter_senders():
        for function in ast.walk(content):
            if module not in modules or not isinstance(function, ast.FunctionDef) or function.name in UNREACHED:
                continue
            for node in ast.walk(function):
                if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in SENDERS:
                    lines = range(node.lineno, (node.end_lineno or node.lineno) + 1)
                    calls.append(Call(module, function.name, node.func.id, lines))
    return calls


def leave_out(call: Call, patch: pytest.MonkeyPatch) -> None:
    """Let a call return its tensor where it is."""
    module = importlib.import_module(call.module)
    send = getattr(module, call.sender)

    def maybe_send(values, device, dtype=None):
        is_left_out = sys._getframe(1).f_lineno in call.lines
        if call.sender == "send_numbers":
            return send(values, torch.device("cpu") if is_left_out else device)
        return values.to(dtype or values.dtype) if is_left_out else send(values, device, dtype)

    patch.setattr(module, call.sender, maybe_send)


def find_needless(calls: list[Call], act: Callable[[], object], waits: Callable[[], Counter[str]]) -> list[str]:
    """Return the calls that `act` can do without, by module and line: with neither an error nor a further wait."""
    act()
    before, needless = waits().total(), []
    for call in calls:
        # Plans hold tensors that were sent.
        build_block_mask.cache_clear()
        plan_fork.cache_clear()
        with pytest.MonkeyPatch.context() as patch:
            leave_out(call, patch)
            try:
                act()
            except RuntimeError as error:
                assert "device" in str(error).lower(), call
                waits()
            else:
                if waits().total() <= before:
                    needless.append(f"{call.module}:{call.lines.start}")
    return needless


class ForwardAlone(KeepGradients):
    def backward(self, loss: torch.Tensor, *, last: bool) -> None:
        pass


@pytest.mark.slow
def test_a_tensor_of_a_micro_batch_that_is_not_sent_is_found(make_tiny, device, waits):
    tiny = make_tiny("qwen3_5_moe")
    sampler = hf_sampler(tiny.policy, tiny.processor, record_routes=True)
    prompt = tiny.processor.build(tiny.samples[4])  # an image and a video
    (rollouts,) = sampler.generate([prompt], 2, tiny.params, step=0)
    experiences = [Experience(rollout=rollout, advantage=1.0) for rollout in rollouts]
    device.place(tiny.policy.model.to(torch.bfloat16))
    learner = make_learner(tiny, routing_replay="engine", optimizer=ForwardAlone())
    learner._shared_prefix_checked = True
    calls = find_calls(*MODULES["micro-batch"])
    assert find_needless(calls, lambda: learner.step(experiences, step=0), waits) == []


@pytest.mark.slow
def test_a_tensor_of_an_update_that_is_not_sent_is_found(make_tiny, device, waits, unscored):
    tiny = make_tiny()
    experiences = make_off_policy_experiences(tiny, group_size=1, demonstrations=True)[::5]
    device.place(tiny.policy.model.to(torch.bfloat16))
    # A component without weights has the norm 0, which is not on the device.
    tiny = replace(tiny, policy=PolicyModel(tiny.policy.model, freeze=("projector",)))
    # A column that an objective does not read may stay on the host: `turn_N` is for ratios of whole sequences.
    objective = {"importance_ratio_level": "sequence", "aggregation": "fixed", "fixed_length": 8}
    learner = make_learner(tiny, shared_prefix=False, **objective)
    calls = find_calls(*MODULES["update"])
    assert find_needless(calls, lambda: learner.step(experiences, step=0), waits) == []


@pytest.mark.slow
def test_a_tensor_of_the_sampler_that_is_not_sent_is_found(make_tiny, device, waits, monkeypatch):
    tiny = make_tiny()
    device.place(tiny.policy.model.to(torch.bfloat16))
    prompts = [tiny.processor.build(sample) for sample in tiny.samples[:2]]
    params = replace(tiny.params, max_new_tokens=2)
    ends = iter(())

    def sample():
        nonlocal ends
        ends = iter([True])  # the first row ends at its first token
        responses = tiny.sampler().generate(prompts, 1, params, step=0)
        tiny.sampler().extend([responses[0][0]], params, step=0)

    monkeypatch.setattr(StopStringMatcher, "matches_end", lambda *_: next(ends, False))
    assert find_needless(find_calls(*MODULES["sampler"]), sample, waits) == []


@pytest.mark.slow
def test_a_tensor_of_a_cache_that_is_not_sent_is_found(make_tiny, device, waits):
    tiny = make_tiny()
    device.place(tiny.policy.model.to(torch.bfloat16))
    prompts = [tiny.processor.build(sample) for sample in tiny.samples[:3:2]]  # an image, and text
    batch = pad_prompts(prompts, tiny.processor, pad_id=tiny.eos_id)

    def extend_rows():
        for shares_prompts in (False, True):
            cache, _ = tiny.policy.prefill(batch)
            rows = DecodeCache(cache, [0, 1], batch.attention_mask_BP, shares_prompts=shares_prompts)
            tiny.policy.append(rows, batch)
            rows.keep_rows([1])

    assert find_needless(find_calls(*MODULES["cache"]), extend_rows, waits) == []


def test_every_module_that_sends_tensors_is_covered():
    senders = {module for module, _ in iter_senders()}
    assert senders == {module for modules in MODULES.values() for module in modules}
