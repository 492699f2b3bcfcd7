"""Log-probs and entropies in chunks: values and gradients of the whole, without its memory."""

import pytest
import torch
from rounding import GRADIENTS, LOGPROBS
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from mmrl.policy import logprobs
from mmrl.policy.logprobs import LogprobHead, LogprobRequest

WIDTH, VOCABULARY, TOKENS = 8, 50, 9


def head_and_hidden(dtype=torch.float32):
    generator = torch.Generator().manual_seed(0)
    linear = nn.Linear(WIDTH, VOCABULARY, bias=False, dtype=dtype)
    with torch.no_grad():
        linear.weight.copy_(torch.randn(VOCABULARY, WIDTH, generator=generator))
    hidden = torch.randn(2, 6, WIDTH, generator=generator).to(dtype).requires_grad_()
    return LogprobHead(linear), hidden


MIXED = torch.tensor([1.0, 0.6, 0.6, 1.0, 1.7, 0.3, 1.0, 0.6, 1.0])


def make_request(chunk=4, temperature_N=MIXED, banned=()):
    return LogprobRequest(
        target_ids_N=torch.tensor([3, 1, 4, 1, 5, 9, 2, 6, 5]),
        predictor_index_N=torch.tensor([0, 0, 0, 2, 3, 7, 8, 11, 5]),  # one state predicts several tokens, others none
        temperature_N=temperature_N,
        banned_token_ids=banned,
        chunk_tokens=chunk,
    )


def score_in_float64(hidden, weight, request):
    """Log-probs and entropies by autograd in float64, [2, N]."""
    picked = hidden.flatten(0, 1)[request.predictor_index_N]
    allowed = [token for token in range(len(weight)) if token not in request.banned_token_ids]
    logps = (picked @ weight[allowed].T / request.temperature_N[:, None].double()).log_softmax(dim=-1)
    places = torch.tensor([allowed.index(token) for token in request.target_ids_N.tolist()])
    return torch.stack([logps.gather(-1, places[:, None]).squeeze(-1), -(logps.exp() * logps).sum(dim=-1)])


def compare_with_float64(head, inputs, hidden_of, request):
    """The largest difference of a score, and the gradients of a mix of them: by the head, and in float64."""
    weights_2N = torch.randn(2, TOKENS, generator=torch.Generator().manual_seed(1))
    with head.use_request(request):
        scores_2N = torch.stack(head(hidden_of(*inputs)))
    found = torch.autograd.grad((scores_2N * weights_2N).sum(), inputs)
    doubles = [each.detach().double().requires_grad_() for each in inputs]
    weight = doubles[[each is head.weight for each in inputs].index(True)]
    expected_2N = score_in_float64(hidden_of(*doubles), weight, request)
    expected = torch.autograd.grad((expected_2N * weights_2N).sum(), doubles)
    return (scores_2N.detach() - expected_2N.detach()).abs().max(), found, expected


@pytest.mark.parametrize("chunk", [1, 4, TOKENS, 1000])
@pytest.mark.parametrize("banned", [(), (0, 7, 49)], ids=["all tokens", "some banned"])
@pytest.mark.parametrize("temperature_N", [torch.ones(TOKENS), MIXED], ids=["temperature 1", "mixed temperatures"])
def test_scores_and_gradients_equal_those_of_autograd(chunk, temperature_N, banned):
    head, hidden = head_and_hidden()
    request = make_request(chunk, temperature_N, banned)
    gap, found, expected = compare_with_float64(head, (hidden, head.weight), lambda h, w: h, request)
    assert gap < LOGPROBS
    for ours, theirs in zip(found, expected, strict=True):
        assert (ours - theirs).norm() < GRADIENTS * theirs.norm()


@pytest.mark.parametrize("chunk", [4, 1000])
def test_a_second_backward_pass_finds_the_same_gradient(chunk):
    head, hidden = head_and_hidden()
    with head.use_request(make_request(chunk)):
        total = sum(scores_N.sum() for scores_N in head(hidden))
    first, second = (torch.autograd.grad(total, (hidden, head.weight), retain_graph=True) for _ in range(2))
    assert all(map(torch.equal, first, second))


@pytest.mark.parametrize("rows", [7, 8192], ids=["slices", "whole"])
@pytest.mark.parametrize("chunk", [1, 4, 1000])
@pytest.mark.parametrize("banned", [(), (0, 7, 49)], ids=["all tokens", "some banned"])
def test_a_float32_layer_of_bfloat16_weights_rounds_gradients_alone(monkeypatch, rows, chunk, banned):
    monkeypatch.setattr(logprobs, "_SLICE_ROWS", rows)
    head, hidden = head_and_hidden(torch.bfloat16)
    head.is_float32 = True
    inputs = (hidden, head.weight)
    gap, found, expected = compare_with_float64(head, inputs, lambda h, w: h, make_request(chunk, banned=banned))
    assert gap < LOGPROBS
    assert {gradient.dtype for gradient in found} == {torch.bfloat16}
    # Autograd adds up the gradients of a state that predicts several tokens, after this layer and in bfloat16.
    assert (found[0] - expected[0]).norm() < 2**-8 * expected[0].norm()
    # Rounded once: by half of the distance between neighbours of bfloat16, 2**-8 of a number at most.
    assert ((found[1] - expected[1]).abs() <= 1.01 * 2**-8 * expected[1].abs() + 1e-6).all()
    head.is_float32 = False
    rounded, _, _ = compare_with_float64(head, inputs, lambda h, w: h, make_request(chunk, banned=banned))
    assert rounded > 100 * gap


def test_a_tied_matrix_has_the_gradient_of_both_its_uses():
    head, _ = head_and_hidden(torch.bfloat16)
    embedding = nn.Embedding(VOCABULARY, WIDTH)
    embedding.weight = head.weight
    head.is_float32 = True
    ids = torch.tensor([[3, 1, 4, 1, 5, 9], [2, 6, 5, 3, 5, 8]])
    _, (found,), (expected,) = compare_with_float64(
        head, (head.weight,), lambda w: nn.functional.embedding(ids, w), make_request()
    )
    assert embedding.weight is head.weight and found.dtype == torch.bfloat16
    # Two gradients and their sum are rounded.
    assert (found - expected).norm() < 2 * 2**-8 * expected.norm()


class LargestFloat32(TorchDispatchMode):
    """The most numbers of a float32 tensor."""

    largest = 0

    def __torch_dispatch__(self, function, types, arguments=(), options=None):
        output = function(*arguments, **(options or {}))
        if isinstance(output, torch.Tensor) and output.dtype == torch.float32:
            self.largest = max(self.largest, output.untyped_storage().nbytes() // 4)
        return output


def test_a_float32_layer_never_holds_a_float32_copy_of_its_weights(monkeypatch):
    monkeypatch.setattr(logprobs, "_SLICE_ROWS", 10)
    head, hidden = head_and_hidden(torch.bfloat16)
    head.is_float32 = True
    head.requires_grad_(False)  # the gradient of the weights is such a matrix
    with LargestFloat32() as seen:
        with head.use_request(make_request(chunk=2)):
            scores_2N = torch.stack(head(hidden))
        scores_2N.sum().backward()
        with torch.no_grad():
            assert head(hidden[:, :1]).dtype == torch.float32  # the sampler's logits
    # Logits of two tokens, a slice of the weights, hidden states and their gradient: fewer than the 400 weights.
    assert max(2 * VOCABULARY, 10 * WIDTH) <= seen.largest <= 12 * WIDTH + 4 < WIDTH * VOCABULARY / 3


def test_logits_for_the_sampler_are_those_that_the_learner_scores():
    head, hidden = head_and_hidden(torch.bfloat16)
    head.is_float32 = True
    asked = make_request()
    with torch.no_grad():
        logits = head(hidden)
        with head.use_request(asked):
            scores_2N = torch.stack(head(hidden))
    assert torch.equal(logits.double().float(), logits) and logits.dtype == torch.float32
    scaled = logits.flatten(0, 1)[asked.predictor_index_N] / asked.temperature_N[:, None]
    picked = scaled.log_softmax(dim=-1).gather(-1, asked.target_ids_N[:, None]).squeeze(-1)
    assert (picked - scores_2N[0]).abs().max() < LOGPROBS


def test_without_a_request_it_is_a_linear_layer():
    head, hidden = head_and_hidden()
    assert torch.equal(head(hidden), nn.functional.linear(hidden, head.weight))
    with pytest.raises(IndexError), head.use_request(make_request(4)):
        head(hidden[:, :1])  # predicts none of them
    assert head(hidden).shape == (2, 6, VOCABULARY)  # a request ends with its block, even by an error


def test_hooks_of_the_layer_are_called():
    head, hidden = head_and_hidden()
    seen = []
    head.register_forward_hook(lambda module, inputs, output: seen.extend(map(len, output)))
    with head.use_request(make_request(4)):
        head(hidden)
    assert seen == [TOKENS, TOKENS]


def test_a_frozen_layer_passes_the_gradient_on():
    head, hidden = head_and_hidden(torch.bfloat16)
    head.requires_grad_(False)
    with head.use_request(make_request(4)):
        head(hidden)[0].sum().backward()
    assert head.weight.grad is None
    assert hidden.grad.dtype == torch.bfloat16
    assert hidden.grad.abs().sum() > 0


class Widest(TorchDispatchMode):
    """The most rows any tensor over the vocabulary had, views of the weight apart."""

    def __init__(self, weight):
        super().__init__()
        self.rows, self.weight = 0, weight

    def __torch_dispatch__(self, function, types, arguments=(), options=None):
        output = function(*arguments, **(options or {}))
        if isinstance(output, torch.Tensor) and output.data_ptr() != self.weight.data_ptr():
            rows, columns = output.shape[:-1].numel(), output.shape[-1] if output.dim() > 1 else 0
            self.rows = max(self.rows, rows if columns == VOCABULARY else 0)
        return output


@pytest.mark.parametrize("chunk", [2, 5])
def test_logits_never_have_more_rows_than_the_chunk(chunk):
    head, hidden = head_and_hidden()
    with Widest(head.weight) as seen:
        with head.use_request(make_request(chunk)):
            scores_2N = torch.stack(head(hidden))
        scores_2N.sum().backward()
    assert seen.rows == chunk
