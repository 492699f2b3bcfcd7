"""A packed row through flash-linear-attention's kernels on a CUDA device, against torch code in float32 there."""

import copy

import pytest
import torch

from mmrl.config.schema import FromScratchConfig, LanguageFromScratchConfig
from mmrl.policy import gated_delta_kernels
from mmrl.policy.batch import PackedGroup
from mmrl.policy.policy import PolicyModel
from mmrl.policy.tiny_models import make_model, train_tokenizer

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no CUDA device"),
    pytest.mark.skipif(
        isinstance(gated_delta_kernels.import_kernels("flash-linear-attention"), Exception),
        reason="flash-linear-attention is not installed: pip install --no-build-isolation -e '.[hybrid]'",
    ),
]
# Prompts and completions: ragged, at borders of chunks of 64, a prompt shorter than the convolution, one alone.
TREE = (PackedGroup(130, (10, 64, 65, 200)), PackedGroup(2, (1, 63)), PackedGroup(5, ()), PackedGroup(64, (128,)))


@pytest.fixture(scope="module")
def model():
    """A model whose recurrent heads have 128 channels, as released ones do."""
    language = LanguageFromScratchConfig(hidden_size=128, num_layers=4, linear_head_dim=128, vocab_size=330)
    tokenizer = train_tokenizer(["How many red circles?"] * 3, 330)
    spec = FromScratchConfig(family="qwen3_5", language=language)
    return PolicyModel(make_model(spec, tokenizer, seed=1)).model.to("cuda")


def logprobs_and_gradient(model):
    length = sum(prompt + sum(completions) for prompt, completions in TREE)
    ids = torch.randint(20, 250, (1, length), generator=torch.Generator().manual_seed(0)).cuda()
    starts = []
    for prompt, completions in TREE:
        starts += [torch.arange(prompt), *(prompt + torch.arange(length) for length in completions)]
    logits = model(
        input_ids=ids,
        position_ids=torch.cat(starts).cuda().expand(3, 1, -1),
        mm_token_type_ids=torch.zeros_like(ids),
        packed_groups=TREE,
        use_cache=False,
    ).logits
    logprobs = logits.float().log_softmax(-1)[0]
    model.zero_grad()
    logprobs[:, ::7].sum().backward()
    gradient = [parameter.grad.float().flatten() for parameter in model.parameters() if parameter.grad is not None]
    return logprobs.detach(), torch.cat(gradient)


def test_kernels_fork_the_state_as_torch_does(model, monkeypatch):
    monkeypatch.setattr(torch.backends.cuda.matmul, "allow_tf32", False)
    monkeypatch.setattr(torch.backends.cudnn, "allow_tf32", False)
    exact, exact_gradient = logprobs_and_gradient(model)
    rounded = copy.deepcopy(model).bfloat16()
    calls = []
    run = gated_delta_kernels.run_rule_kernel
    monkeypatch.setattr(
        "mmrl.policy.gated_delta_net.run_rule_kernel", lambda *given: calls.append(given[1]) or run(*given)
    )
    found, gradient = logprobs_and_gradient(rounded)
    assert [state is None for state in calls] == [True, False] * 3  # prompts, then completions, in each layer
    # What rounding to bfloat16 does to torch's own code.
    monkeypatch.setattr("mmrl.policy.gated_delta_net.has_rule_kernel", lambda tensor: False)
    by_torch, gradient_by_torch = logprobs_and_gradient(rounded)
    assert (found - exact).abs().mean() < 2 * (by_torch - exact).abs().mean()
    assert (gradient - exact_gradient).norm() < 2 * (gradient_by_torch - exact_gradient).norm()
    assert (gradient - exact_gradient).norm() < 0.1 * exact_gradient.norm()
