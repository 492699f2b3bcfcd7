"""The gated delta rule against its recurrence in float64, token by token: outputs, states and gradients."""

import pytest
import torch
from torch.nn import functional as F
from transformers.models.qwen3_5.modeling_qwen3_5 import torch_chunk_gated_delta_rule

from mmrl.policy.delta_rule import gated_delta_rule, gated_delta_step

ROUNDING = 2e-6  # relative; 130 tokens add up
# Fast decays add up to exponents of several hundred in a chunk, which are rounded.
ROUNDING_OF_DECAYS = 3e-5
# Sequences, tokens, key heads, value heads, channels of a key, channels of a value.
SHAPES = {
    "one token": (1, 1, 2, 4, 8, 8),
    "one chunk": (2, 64, 1, 1, 16, 8),
    "chunks of 33 and 32 tokens": (3, 65, 2, 4, 8, 16),
    "three chunks": (2, 130, 2, 6, 16, 16),
}
memories = pytest.mark.parametrize(
    "decay_offset", [-6.0, 0.0, 4.0, 12.0], ids=["long memory", "short memory", "almost none", "none"]
)


def make_inputs(shape, decay_offset):
    """Queries, keys, values, log-decays, write strengths and initial states; a larger offset decays faster."""
    count, length, key_heads, heads, key_width, width = shape
    generator = torch.Generator().manual_seed(0)

    def sample(*sizes):
        return torch.randn(*sizes, generator=generator, dtype=torch.float64)

    inputs = {
        "query": F.normalize(sample(count, length, key_heads, key_width), dim=-1),
        "key": F.normalize(sample(count, length, key_heads, key_width), dim=-1),
        "value": sample(count, length, heads, width),
        "log_decay": -F.softplus(sample(count, length, heads) + decay_offset),
        "write_strength": sample(count, length, heads).sigmoid(),
        "initial_state": sample(count, heads, key_width, width),
    }
    return {name: tensor.requires_grad_() for name, tensor in inputs.items()}


def recurrence(query, key, value, log_decay, write_strength, initial_state):
    """Equation 10 of arXiv:2412.06464, token by token."""
    repeats = value.shape[2] // key.shape[2]
    query, key = (tensor.repeat_interleave(repeats, dim=2) for tensor in (query, key))
    state, outputs = initial_state, []
    for t in range(query.shape[1]):
        state = state * log_decay[:, t, :, None, None].exp()
        recalled = (state * key[:, t, :, :, None]).sum(-2)
        written = (value[:, t] - recalled) * write_strength[:, t, :, None]
        state = state + key[:, t, :, :, None] * written[:, :, None]
        outputs.append((state * query[:, t, :, :, None]).sum(-2))
    return torch.stack(outputs, dim=1), state


def rule_of_transformers(query, key, value, log_decay, write_strength, initial_state):
    repeats = value.shape[2] // key.shape[2]
    query = query * query.shape[-1] ** 0.5  # which it divides by
    query, key = (tensor.repeat_interleave(repeats, dim=2) for tensor in (query, key))
    options = {"initial_state": initial_state, "output_final_state": True, "use_qk_l2norm_in_kernel": False}
    return torch_chunk_gated_delta_rule(query, key, value, g=log_decay, beta=write_strength, **options)


def with_gradients(rule, inputs):
    """Outputs, states and the gradient of each input, of a random function of outputs and states."""
    results = rule(**inputs)
    generator = torch.Generator().manual_seed(1)
    total = 0.0
    for result in results:
        weights = torch.randn(result.shape, generator=generator, dtype=torch.float64)
        total = total + (result * weights.to(result.dtype)).sum()
    gradients = torch.autograd.grad(total, list(inputs.values()))
    return [*results, *gradients]


@memories
@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
def test_the_rule_is_its_recurrence_in_float64_at_least_as_closely_as_that_of_transformers(shape, decay_offset):
    exact = make_inputs(shape, decay_offset)
    rounded = {name: tensor.detach().float().requires_grad_() for name, tensor in exact.items()}
    expected = with_gradients(recurrence, exact)
    found, theirs = (with_gradients(rule, rounded) for rule in (gated_delta_rule, rule_of_transformers))
    for name, right, our, their in zip(("output", "state", *exact), expected, found, theirs, strict=True):
        bound = ROUNDING_OF_DECAYS if name == "log_decay" else ROUNDING
        assert (our - right).norm() / right.norm() < bound, name
        if shape == SHAPES["three chunks"]:
            # Where both are right to the last digit, either may be nearer.
            assert (our - right).norm() <= (their - right).norm() + 3e-7 * right.norm(), name


def test_padding_changes_no_state_and_has_no_gradient():
    inputs = make_inputs((2, 70, 1, 2, 8, 8), 0.0)
    is_token = torch.arange(70) < torch.tensor([[70], [41]])
    for name in ("log_decay", "write_strength"):
        inputs[name] = (inputs[name].detach() * is_token[..., None]).requires_grad_()
    padded = {name: tensor.detach().float().requires_grad_() for name, tensor in inputs.items()}
    output, state = gated_delta_rule(**padded)
    # The second sequence alone, without its padding.
    short = {name: tensor.detach()[1:] for name, tensor in padded.items()}
    short |= {name: tensor[:, :41] for name, tensor in short.items() if name != "initial_state"}
    alone, last = gated_delta_rule(**short)
    torch.testing.assert_close(output[1:, :41], alone)
    torch.testing.assert_close(state[1:], last)
    (output * is_token[..., None, None]).sum().backward()
    for name in ("query", "key", "value"):
        assert not padded[name].grad[1, 41:].any()


def test_inputs_of_16_bits_are_computed_in_float32():
    inputs = {name: tensor.detach().bfloat16() for name, tensor in make_inputs(SHAPES["three chunks"], 0.0).items()}
    output, state = gated_delta_rule(**inputs)
    expected, last = gated_delta_rule(**{name: tensor.float() for name, tensor in inputs.items()})
    assert output.dtype == state.dtype == torch.float32
    assert torch.equal(output, expected) and torch.equal(state, last)


def test_the_rule_token_by_token_is_the_rule_at_once():
    inputs = {name: tensor.detach().float() for name, tensor in make_inputs((3, 5, 2, 6, 8, 16), 0.0).items()}
    expected, last = gated_delta_rule(**inputs)
    state = inputs.pop("initial_state").clone()
    outputs = [gated_delta_step(*(tensor[:, t] for tensor in inputs.values()), state=state) for t in range(5)]
    torch.testing.assert_close(torch.stack(outputs, dim=1), expected)
    torch.testing.assert_close(state, last)
