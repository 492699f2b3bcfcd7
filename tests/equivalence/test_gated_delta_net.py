"""Gated DeltaNet in packed rows and after caches, against transformers' layer on one sequence at a time."""

import copy
import sys
from dataclasses import replace
from itertools import pairwise
from types import ModuleType

import pytest
import torch
import transformers.models.qwen3_5.modeling_qwen3_5 as modeling
from rounding import GRADIENTS, LOGPROBS
from torch.nn import functional as F
from transformers import DynamicCache

from mmrl.policy import gated_delta_kernels
from mmrl.policy.batch import PackedGroup

FAMILIES = ("qwen3_5", "qwen3_5_moe")
# Lengths of prompts and of their completions. The rule works in chunks of 64 tokens, the convolution over 4.
TREES = {
    "ragged": [(30, (10, 64, 70, 1))],
    "shorter than the convolution": [(1, (1, 2)), (2, (3, 1))],
    "borders of chunks": [(64, (64, 63, 65)), (65, (1,)), (63, (127, 128, 129))],
    "several groups, one without completions": [(20, (5, 40)), (3, ()), (33, (7,)), (70, (20, 128, 5))],
}


def plain_model(tiny):
    """A copy with transformers' own layers, attention included."""
    model = copy.deepcopy(tiny.policy.model)
    model.get_decoder().config._attn_implementation = "sdpa"
    for layer in model.modules():
        layer.__dict__.pop("forward", None)
    return model


def random_sequences(tree):
    """Ids of each prompt, and of its completions."""
    generator = torch.Generator().manual_seed(0)
    return [
        [torch.randint(20, 300, (length,), generator=generator) for length in (prompt, *completions)]
        for prompt, completions in tree
    ]


def packed_logits(model, sequences):
    """Logits of every completion's tokens in one packed row."""
    ids, positions, tree = [], [], []
    for prompt, *completions in sequences:
        tree.append(PackedGroup(len(prompt), tuple(map(len, completions))))
        ids += [prompt, *completions]
        positions.append(torch.arange(len(prompt)))
        positions += [len(prompt) + torch.arange(len(completion)) for completion in completions]
    row = torch.cat(ids)[None]
    logits = model(
        input_ids=row,
        position_ids=torch.cat(positions).expand(3, 1, -1),
        mm_token_type_ids=torch.zeros_like(row),
        packed_groups=tuple(tree),
        use_cache=False,
    ).logits[0]
    found, column = [], 0
    for prompt, *completions in sequences:
        column += len(prompt)
        for completion in completions:
            found.append(logits[column : column + len(completion)])
            column += len(completion)
    return found


def plain_logits(model, sequences):
    """Return the same logits from a forward pass for each completion."""
    found = []
    for prompt, *completions in sequences:
        for completion in completions:
            ids = torch.cat([prompt, completion])[None]
            found.append(forward(model, ids)[0, len(prompt) :])
    return found


def forward(model, ids):
    return model(input_ids=ids, mm_token_type_ids=torch.zeros_like(ids), use_cache=False).logits


def gradient_of(model, logits):
    model.zero_grad()
    torch.stack([part.log_softmax(-1)[:, ::7].sum() for part in logits]).sum().backward()
    return torch.cat([parameter.grad.flatten() for parameter in model.parameters() if parameter.grad is not None])


def distance(found, reference):
    return float((found.double() - reference.double()).norm() / reference.double().norm())


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("tree", TREES.values(), ids=TREES)
def test_a_packed_row_gives_the_logits_and_gradients_of_plain_rows(make_tiny, family, tree):
    tiny = make_tiny(family)
    model, plain, sequences = tiny.policy.model.train(), plain_model(tiny).train(), random_sequences(tree)
    packed, separate = packed_logits(model, sequences), plain_logits(plain, sequences)
    for ours, theirs in zip(packed, separate, strict=True):
        assert (ours.log_softmax(-1) - theirs.log_softmax(-1)).abs().max() < LOGPROBS
    assert distance(gradient_of(model, packed), gradient_of(plain, separate)) < GRADIENTS


def pad_left(rows, columns):
    """Ids and mask of rows, padded on the left."""
    ids = torch.stack([F.pad(row, (columns - len(row), 0)) for row in rows])
    return ids, torch.stack([F.pad(torch.ones_like(row), (columns - len(row), 0)) for row in rows])


@torch.no_grad()
@pytest.mark.parametrize("appended", [(9, 0, 70, 1), (3, 3, 3, 3), (1, 0, 2, 0)])
def test_rows_of_several_lengths_are_appended_to_a_cache_and_reordered(make_tiny, appended):
    """Then rows leave, come twice and change places, and each takes one more token."""
    tiny = make_tiny("qwen3_5")
    model, plain, lengths = tiny.policy.model.eval(), plain_model(tiny).eval(), (7, 70, 130, 2)
    totals = [length + more + 1 for length, more in zip(lengths, appended, strict=True)]
    ((_, *full),) = random_sequences([(1, totals)])
    cache = DynamicCache(config=model.config.get_text_config())

    def step(rows, keep, positions):
        """The logits after the last column of left-padded new tokens."""
        return model(
            input_ids=rows,
            mm_token_type_ids=torch.zeros_like(rows),
            attention_mask=keep,
            position_ids=positions.expand(3, -1, -1),
            past_key_values=cache,
            use_cache=True,
            logits_to_keep=1,
        ).logits[:, -1]

    prompts, keep = pad_left([ids[:length] for ids, length in zip(full, lengths, strict=True)], max(lengths))
    step(prompts, keep, (keep.cumsum(1) - 1).clamp(min=0))
    tails = [ids[length:-1] for ids, length in zip(full, lengths, strict=True)]
    more, is_new = pad_left(tails, max(appended))
    positions = (is_new.cumsum(1) - 1).clamp(min=0) + torch.tensor(lengths)[:, None]
    keep = torch.cat([keep, is_new], dim=1)
    logits = step(more, keep, positions)
    for row, ids in enumerate(full):
        if appended[row]:
            expected = forward(plain, ids[None, :-1])[0, -1]
            assert (logits[row].log_softmax(-1) - expected.log_softmax(-1)).abs().max() < LOGPROBS
    order = torch.tensor([3, 1, 1, 0])
    cache.reorder_cache(order)
    last = torch.stack([full[row][-1:] for row in order])
    places = torch.tensor([[totals[row] - 1] for row in order])
    logits = step(last, F.pad(keep[order], (0, 1), value=1), places)
    for found, row in zip(logits, order, strict=True):
        expected = forward(plain, full[row][None])[0, -1]
        assert (found.log_softmax(-1) - expected.log_softmax(-1)).abs().max() < LOGPROBS


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("lengths", [(1, 0), (2, 5)])
def test_the_sampler_continues_responses_of_several_lengths(make_tiny, family, lengths):
    tiny = make_tiny(family)
    greedy = replace(tiny.params, temperature=0.0)
    group = [experience.rollout for experience in tiny.experiences(tiny.samples[:1], 2, temperature=0.0)]
    begun = []
    for rollout, length in zip(group, lengths, strict=True):
        (segment,) = rollout.segments
        segment = replace(segment, token_ids=segment.token_ids[:length], logprobs=segment.logprobs[:length])
        begun.append(replace(rollout, segments=(segment,) if length else ()))
    for whole, rollout in zip(group, tiny.sampler().extend(begun, greedy, step=0), strict=True):
        ids = [token for segment in rollout.segments for token in segment.token_ids]
        logprobs = [logprob for segment in rollout.segments for logprob in segment.logprobs]
        (expected,) = whole.segments
        assert len(ids) >= len(expected.token_ids)
        for token, logprob, expected_token, expected_logprob in zip(
            ids, logprobs, expected.token_ids, expected.logprobs, strict=False
        ):
            assert abs(logprob - expected_logprob) < LOGPROBS
            if token != expected_token:  # as likely as the other, up to rounding
                break


def chunk_gated_delta_rule(q, k, v, g, beta, *, initial_state, cu_seqlens, **options):
    """flash-linear-attention's function with its demands; it runs each sequence by transformers' torch code.

    Source: fla/ops/gated_delta_rule/chunk.py of flash-linear-attention at bc3b101. Its Triton kernels ask for more than
    the function checks: a sequence has a token, and is in 16 bits, except for the decay and the states.
    """
    assert options == {"use_qk_l2norm_in_kernel": True, "output_final_state": True}
    assert q.shape == k.shape and v.shape[2] % k.shape[2] == 0
    assert q.dtype == k.dtype == v.dtype == torch.bfloat16 and g.dtype == torch.float32
    assert q.shape[0] == 1 and cu_seqlens.dtype == torch.int64
    assert cu_seqlens[0] == 0 and cu_seqlens[-1] == q.shape[1] and (cu_seqlens.diff() > 0).all()
    if initial_state is not None:
        assert initial_state.shape[0] == len(cu_seqlens) - 1 and initial_state.dtype == torch.float32
    outputs, states = [], []
    for number, (start, end) in enumerate(pairwise(cu_seqlens.tolist())):
        output, state = modeling.torch_chunk_gated_delta_rule.__wrapped__.__wrapped__(
            *(tensor[:, start:end] for tensor in (q, k, v, g, beta)),
            initial_state=None if initial_state is None else initial_state[number : number + 1],
            **options,
        )
        outputs.append(output)
        states.append(state)
    return torch.cat(outputs, dim=1), torch.cat(states)


@pytest.fixture
def install_kernel(monkeypatch):
    """Pretend that flash-linear-attention is installed and bfloat16 is on a GPU; return the calls of its kernel."""

    def install():
        calls = []

        def record(*tensors, **options):
            calls.append(options)
            return chunk_gated_delta_rule(*tensors, **options)

        module = ModuleType("fla.ops.gated_delta_rule")
        module.chunk_gated_delta_rule = record
        for name in ("fla", "fla.ops"):
            monkeypatch.setitem(sys.modules, name, ModuleType(name))
        monkeypatch.setitem(sys.modules, module.__name__, module)
        monkeypatch.setattr(gated_delta_kernels, "suits_kernel", lambda x: x.dtype == torch.bfloat16)
        gated_delta_kernels.import_kernels.cache_clear()
        return calls

    yield install
    gated_delta_kernels.import_kernels.cache_clear()


@pytest.mark.parametrize("tree", TREES.values(), ids=TREES)
def test_flash_linear_attention_forks_in_two_calls_a_layer(make_tiny, install_kernel, tree):
    """All prompts in one call, all completions in another, which continues from the states of the first."""
    model, sequences = make_tiny("qwen3_5").policy.model.bfloat16().train(), random_sequences(tree)
    by_torch = packed_logits(model, sequences)
    gradient_by_torch = gradient_of(model, by_torch)
    calls = install_kernel()
    by_kernel = packed_logits(model, sequences)
    recurrent = [layer for layer in model.modules() if hasattr(layer, "A_log")]
    assert [call["initial_state"] is None for call in calls] == [True, False] * len(recurrent)
    for ours, theirs in zip(by_kernel, by_torch, strict=True):
        # In float32: a log-prob of -6 in bfloat16 is rounded to steps of 0.03.
        assert (ours.float().log_softmax(-1) - theirs.float().log_softmax(-1)).abs().max() < 0.05
    assert distance(gradient_of(model, by_kernel), gradient_by_torch) < 0.05
    calls.clear()
    packed_logits(model.float(), sequences)
    assert not calls  # the kernels would round float32
