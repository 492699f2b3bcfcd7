"""Each place that sends a tensor to the device is needed: without it, the pretended device raises or waits."""

from __future__ import annotations

import ast
import importlib
import sys
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

import pytest
import torch
from learning import make_learner, make_off_policy_experiences
from samplers import hf_sampler

import mmrl
from mmrl.policy.batch import collate_prompts
from mmrl.policy.gated_delta_net import plan_fork
from mmrl.policy.policy import Policy
from mmrl.policy.prefix_cache import RowCache
from mmrl.policy.shared_prefix_attention import build_block_mask
from mmrl.rollout.responses import StopStringMatcher

ROOT = Path(mmrl.__file__).parent.parent
SENDERS = ("send", "send_numbers")
# What `_join_pieces` sends is read by flash-linear-attention's kernel alone.
UNREACHED = {"_join_pieces"}
SAMPLING = {"mmrl.rollout.engines.hf", "mmrl.policy.prefix_cache"}


class Call(NamedTuple):
    """A call of `send` or `send_numbers`."""

    module: str
    function: str
    sender: str
    lines: range


def find_calls(*, of_sampling: bool) -> list[Call]:
    calls = []
    for path in sorted((ROOT / "mmrl").rglob("*.py")):
        text = path.read_text(encoding="utf-8")
        if "mmrl.utils.torch_transfer import" not in text:
            continue
        module = ".".join(path.relative_to(ROOT).with_suffix("").parts)
        for function in ast.walk(ast.parse(text)):
            if not isinstance(function, ast.FunctionDef) or function.name in UNREACHED:
                continue
            if (module in SAMPLING or function.name in ("append", "_append")) is not of_sampling:
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


@pytest.mark.slow
def test_a_tensor_of_the_learner_that_is_not_sent_is_found(make_tiny, device, waits):
    tiny = make_tiny("qwen3_5_moe")
    sampler = hf_sampler(tiny.policy, tiny.processor, record_routes=True)
    experiences = make_off_policy_experiences(tiny, group_size=1, sampler=sampler, demonstrations=True)
    experiences = experiences[4::5]  # an image and a video, with a response and a demonstration
    device.place(tiny.policy.model, torch.bfloat16)
    tiny = replace(tiny, policy=Policy(tiny.policy.model, freeze=("projector",)))
    learner = make_learner(tiny, routing_replay="engine", aggregation="fixed", fixed_length=8)
    learner._shared_prefix_checked = True
    calls = find_calls(of_sampling=False)
    assert len({call.module for call in calls}) == 8
    assert find_needless(calls, lambda: learner.step(experiences, step=0), waits) == []


@pytest.mark.slow
def test_a_tensor_of_the_sampler_that_is_not_sent_is_found(make_tiny, device, waits, monkeypatch):
    tiny = make_tiny("qwen3_5")
    device.place(tiny.policy.model, torch.bfloat16)
    prompts = [tiny.processor.build(sample) for sample in tiny.samples[:2]]
    params = replace(tiny.params, max_new_tokens=2)
    batch = collate_prompts(prompts, tiny.processor, pad_id=tiny.eos_id)
    is_first = True

    def end_first_row(matcher, ids):
        nonlocal is_first
        is_first, ends = False, is_first
        return ends

    def sample():
        nonlocal is_first
        is_first = True
        responses = tiny.sampler().generate(prompts, 1, params, step=0)
        tiny.sampler().extend([response for (response,) in responses], params, step=0)
        for shares_prompts in (False, True):
            cache, _ = tiny.policy.prefill(batch)
            rows = RowCache(cache, [0, 1], batch.attention_mask_BP, shares_prompts=shares_prompts)
            tiny.policy.append(rows, batch)
            rows.keep_rows([1])

    monkeypatch.setattr(StopStringMatcher, "matches_end", end_first_row)
    assert find_needless(find_calls(of_sampling=True), sample, waits) == []
