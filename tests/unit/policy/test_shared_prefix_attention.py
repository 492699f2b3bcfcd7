"""Attention in a packed row against one masked softmax, and the block mask of FlexAttention."""

import random

import pytest
import torch
from rounding import GRADIENTS
from torch.nn.attention.flex_attention import create_block_mask, flex_attention
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from mmrl.policy.batch import PackedGroup
from mmrl.policy.shared_prefix_attention import attention_blocks, build_block_mask, shared_prefix_attention
from mmrl.types import UserError

TREES = [
    (PackedGroup(5, (3, 1, 4)),),
    (PackedGroup(1, (1, 1)), PackedGroup(7, (2,)), PackedGroup(4, ()), PackedGroup(2, (5, 3))),
    (PackedGroup(150, (40, 30)), PackedGroup(20, (9,) * 6)),
]


def visible(tree):
    """The mask of a row, bool [T, T]: a token sees its own piece and the prompt of its group, up to itself."""
    piece, prompt = [], []
    for group in tree:
        first = piece[-1] + 1 if piece else 0
        lengths = (group.prompt_length, *group.response_lengths)
        for number, length in enumerate(lengths, start=first):
            piece += [number] * length
            prompt += [first] * length
    piece, prompt = torch.tensor(piece), torch.tensor(prompt)
    return ((piece[:, None] == piece) | (prompt[:, None] == piece)).tril()


def inputs(tree, dtype, *, heads=6, key_heads=2, width=12):
    """Query, key and value laid out as a Qwen layer has them, [1, heads, T, D]."""
    generator = torch.Generator().manual_seed(0)
    length = sum(prompt_length + sum(response_lengths) for prompt_length, response_lengths in tree)
    return tuple(
        torch.randn(1, length, count, width, generator=generator).to(dtype).transpose(1, 2).requires_grad_()
        for count in (heads, key_heads, key_heads)
    )


def masked_softmax(query, key, value, mask, scale):
    """The output, and the inputs in float64, whose gradients are those expected."""
    query, key, value = (x.detach().double().requires_grad_() for x in (query, key, value))
    keys, values = (x.repeat_interleave(query.shape[1] // x.shape[1], dim=1) for x in (key, value))
    scores = (query @ keys.transpose(-1, -2) * scale).masked_fill(~mask, -torch.inf)
    return (scores.softmax(dim=-1) @ values).transpose(1, 2), (query, key, value)


@pytest.mark.parametrize("tree", TREES)
@pytest.mark.parametrize(("dtype", "bound"), [(torch.float32, GRADIENTS), (torch.bfloat16, 1e-2)])
def test_output_and_gradients_are_those_of_a_masked_softmax(tree, dtype, bound):
    leaves = inputs(tree, dtype)
    output, _ = shared_prefix_attention(None, *leaves, None, packed_groups=tree, scaling=0.3)
    expected, expected_leaves = masked_softmax(*leaves, visible(tree), 0.3)
    upstream = torch.randn(output.shape, generator=torch.Generator().manual_seed(1))
    output.backward(upstream.to(dtype))
    expected.backward(upstream.to(dtype).double())
    assert output.dtype == dtype
    assert (output - expected).norm() <= bound * expected.norm()
    for leaf, expected_leaf in zip(leaves, expected_leaves, strict=True):
        assert leaf.grad.dtype == dtype
        assert (leaf.grad - expected_leaf.grad).norm() <= bound * expected_leaf.grad.norm()


@pytest.mark.parametrize("tree", TREES)
def test_flex_attention_with_the_block_mask_is_a_masked_softmax(tree):
    leaves = [leaf.detach() for leaf in inputs(tree, torch.float32, width=16)]
    mask = build_block_mask(tree, torch.device("cpu"))
    output = flex_attention(*leaves, block_mask=mask, scale=0.3, enable_gqa=True).transpose(1, 2)
    expected, _ = masked_softmax(*leaves, visible(tree), 0.3)
    assert (output - expected).norm() <= GRADIENTS * expected.norm()


def random_tree(rng):
    """Groups whose borders fall within blocks, onto their borders, and one token beside them."""
    near = [size + shift for size in (128, 256, 384) for shift in (-1, 0, 1)]
    tree = []
    for _ in range(rng.randint(1, 4)):
        prompt = rng.choice([1, rng.randint(1, 300), *near])
        completions = [rng.choice([0, 1, rng.randint(1, 200), *near]) for _ in range(rng.choice([0, 1, 2, 3, 8]))]
        tree.append(PackedGroup(prompt, tuple(completions)))
    return tuple(tree)


def listed(num_blocks, indices):
    """The blocks of each row as lists, without the undefined entries after them."""
    counts, rows = num_blocks[0, 0].tolist(), indices[0, 0].tolist()
    return [row[:count] for count, row in zip(counts, rows, strict=True)]


@pytest.mark.parametrize("seed", range(16))
def test_the_block_mask_is_the_one_that_torch_makes_token_by_token(seed):
    tree = random_tree(random.Random(seed))
    mask = build_block_mask(tree, torch.device("cpu"))
    shown = visible(tree)
    expected = create_block_mask(lambda b, h, q, k: shown[q, k], None, None, *shown.shape, device="cpu")
    assert mask.seq_lengths == expected.seq_lengths == tuple(shown.shape)
    assert mask.BLOCK_SIZE == expected.BLOCK_SIZE
    for kind in ("kv", "full_kv", "q", "full_q"):
        names = (f"{kind}_num_blocks", f"{kind}_indices")
        found, wanted = ([getattr(each, name) for name in names] for each in (mask, expected))
        assert [each.dtype for each in found] == [each.dtype for each in wanted], kind
        assert listed(*found) == listed(*wanted), kind
    positions = torch.arange(len(shown))
    zero = torch.zeros((), dtype=torch.int64)
    assert torch.equal(mask.mask_mod(zero, zero, positions[:, None], positions), shown)


@pytest.mark.slow
def test_the_compiled_kernel_reads_the_block_lists_correctly(monkeypatch):
    """Uncompiled, FlexAttention asks the rule for each pair of tokens and never reads the lists."""
    monkeypatch.setattr("torch._dynamo.config.disable", False)
    compiled = torch.compile(flex_attention, dynamic=True)
    for seed in range(6):
        tree = random_tree(random.Random(seed))
        leaves = [leaf.detach() for leaf in inputs(tree, torch.float32, width=32)]
        mask = build_block_mask(tree, torch.device("cpu"))
        with torch.no_grad():
            output = compiled(*leaves, block_mask=mask, scale=0.3, enable_gqa=True).transpose(1, 2)
            expected, _ = masked_softmax(*leaves, visible(tree), 0.3)
        assert (output - expected).norm() <= GRADIENTS * expected.norm()


class AllocatedBytes(TorchDispatchMode):
    """Adds up the bytes of every tensor that an operation returns, whether or not it is freed again."""

    total = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        output = function(*args, **(kwargs or {}))
        for leaf in tree_leaves(output):
            self.total += leaf.nbytes if isinstance(leaf, torch.Tensor) else 0
        return output


@pytest.mark.parametrize("tree", [(PackedGroup(2000, (500,) * 4),) * 8, (PackedGroup(31_000, (250,) * 4),)])
def test_the_mask_of_32000_tokens_takes_less_than_64_mebibytes(tree):
    with AllocatedBytes() as allocated:
        build_block_mask(tree, torch.device("cpu"))
    assert 0 < allocated.total < 64 * 2**20


@pytest.mark.parametrize("tree", TREES)
def test_attention_blocks_are_disjoint_and_cover_what_is_visible(tree):
    shown = torch.zeros_like(visible(tree), dtype=torch.int64)
    touched = torch.zeros(len(shown), dtype=torch.bool)
    for block in attention_blocks(tree):
        queries, keys = block.queries.stop - block.queries.start, block.keys.stop - block.keys.start
        part = torch.ones(queries, keys, dtype=torch.int64)
        shown[block.queries, block.keys] += part.tril() if block.causal else part
        assert touched[block.queries].all() == block.merges == touched[block.queries].any()
        touched[block.queries] = True
    assert torch.equal(shown, visible(tree).long())


def test_a_sliding_window_is_refused():
    with pytest.raises(UserError, match="shared_prefix: the model attends within a sliding window"):
        shared_prefix_attention(
            None, *inputs(TREES[0], torch.float32), None, packed_groups=TREES[0], scaling=1.0, sliding_window=8
        )
