"""Rows that share their prompts' keys: attention against a softmax over copies of them, and rows that leave."""

from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from rounding import GRADIENTS, LOGPROBS
from samplers import hf_sampler
from transformers import DynamicCache

from mmrl.policy import decode_cache
from mmrl.policy.decode_cache import DecodeCache
from mmrl.policy.policy import PolicyModel

HEADS, KEY_HEADS, WIDTH, SCALE = 6, 2, 12, 0.3
LAYER = SimpleNamespace(layer_idx=0)


def random_tensor(*shape, dtype=torch.float32, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


class Rows:
    """A cache of one layer beside a list of each row's keys and values."""

    def __init__(self, prompt_lengths, prompt_of_row, dtype):
        longest = max(prompt_lengths)
        keys, values = (
            random_tensor(len(prompt_lengths), KEY_HEADS, longest, WIDTH, dtype=dtype, seed=n) for n in (1, 2)
        )
        prompts = DynamicCache()
        prompts.update(keys, values, 0)
        keep = torch.stack([(torch.arange(longest) >= longest - length).long() for length in prompt_lengths])
        self.cache = DecodeCache(prompts, prompt_of_row, keep, shares_prompts=True)
        self.lists = []
        for prompt in prompt_of_row:
            seen = slice(longest - prompt_lengths[prompt], None)
            self.lists.append((keys[prompt, :, seen].clone(), values[prompt, :, seen].clone()))

    def append(self, lengths, *, mask, seed):
        """The largest distance of the outputs of new tokens, padded on the left, from their softmax in float64."""
        columns, rows = max(lengths), len(lengths)
        dtype = self.lists[0][0].dtype
        query = random_tensor(rows, HEADS, columns, WIDTH, dtype=dtype, seed=seed)
        key, value = (random_tensor(rows, KEY_HEADS, columns, WIDTH, dtype=dtype, seed=seed + n) for n in (100, 200))
        own = self.cache.cache.update(key, value, 0)
        found = self.cache.attend(LAYER, query, *own, mask, SCALE)
        assert found.dtype == dtype and found.shape == (rows, columns, HEADS, WIDTH)
        assert found.isfinite().all()
        worst = 0.0
        for row, length in enumerate(lengths):
            keys, values = self.lists[row]
            for column in range(columns - length, columns):
                keys, values = (
                    torch.cat([x, y[row, :, column : column + 1]], 1) for x, y in ((keys, key), (values, value))
                )
                wide = (x.double().repeat_interleave(HEADS // KEY_HEADS, 0) for x in (keys, values))
                all_keys, all_values = wide
                scores = (all_keys @ query[row, :, column, :, None].double()).squeeze(-1) * SCALE
                expected = (scores.softmax(-1)[:, None] @ all_values).squeeze(1)
                worst = max(worst, float((found[row, column] - expected).norm() / expected.norm()))
            self.lists[row] = (keys, values)
        return worst

    def keep(self, kept):
        self.lists = [self.lists[row] for row in self.cache.keep_rows(kept)]


@pytest.mark.parametrize(("dtype", "bound"), [(torch.float32, GRADIENTS), (torch.bfloat16, 1e-2)])
@pytest.mark.parametrize("prompt_lengths", [(9, 9, 9), (5, 1, 640)])
def test_rows_attend_to_their_prompt_and_themselves_while_others_leave(monkeypatch, prompt_lengths, dtype, bound):
    """The kernel reads 512 keys at a time, so the short prompts have blocks of nothing but padding."""
    monkeypatch.setattr(decode_cache, "_CHUNK_COLUMNS", 4)
    rows = Rows(prompt_lengths, [0, 1, 0, 2, 1, 2, 0], dtype)
    for step in range(6):
        assert rows.append([1] * len(rows.lists), mask=None, seed=step) < bound
    rows.keep([1, 3, 4, 6])
    assert rows.append([1] * 4, mask=None, seed=10) < bound
    rows.keep([1, 2])  # the first prompt has no row any more
    for step in range(5):
        assert rows.append([1] * 2, mask=None, seed=20 + step) < bound
    assert len(rows.cache.cache.layers[0].prompt_keys) < 3


def test_rows_and_prompts_move_as_in_the_docstrings():
    moves = decode_cache._plan_moves([1, 3, 4], torch.device("cpu"))
    assert (moves.order, moves.to.tolist(), moves.start.tolist()) == ([3, 1, 4], [0, 2], [3, 4])
    assert moves.apply(torch.arange(5)).tolist() == moves.order
    cache = Rows((2, 2, 2), [0, 1, 1, 2, 2], torch.float32).cache
    prompts = cache.cache.layers[0].prompt_keys.clone()
    assert cache.keep_rows([1, 3, 4]) == [3, 1, 4]
    assert cache._prompt_of_row == [0, 1, 0]
    assert torch.equal(cache.cache.layers[0].prompt_keys, prompts[[2, 1]])


@pytest.mark.parametrize("lengths", [(3, 3, 3), (1, 4, 0)])
def test_new_tokens_see_no_later_token_and_no_padding(lengths):
    rows, columns = Rows((5, 1, 7), [2, 0, 1], torch.float32), max(lengths)
    keep = torch.stack([(torch.arange(columns) >= columns - length).long() for length in lengths])
    kept = rows.cache.extend_mask(keep)
    assert torch.equal(kept, keep)
    # As transformers makes of it.
    mask = None if keep.all() else (torch.ones(columns, columns).tril() * kept[:, None]).bool()[:, None]
    assert rows.append(lengths, mask=mask, seed=3) < GRADIENTS
    rows.keep([1, 2])
    assert rows.append([1, 1], mask=rows.cache.extend_mask_by_token(), seed=4) < GRADIENTS


@pytest.mark.parametrize("family", ["qwen2_5_vl", "qwen3_5"])
@pytest.mark.parametrize("attention", ["eager", "mmrl_shared_prefix"])
def test_an_attention_that_cannot_share_prompts_samples_the_same(make_tiny, family, attention):
    tiny = make_tiny(family)
    prompts = [tiny.processor.build(sample) for sample in tiny.samples[:3]]
    params = replace(tiny.params, temperature=3.0, max_new_tokens=12, stop=("e",))  # many rows end early
    groups = tiny.sampler().generate(prompts, 8, params, step=0)
    tiny.policy.model.get_decoder().config._attn_implementation = attention
    policy = PolicyModel(tiny.policy.model)
    policy.supports_shared_prefix = False
    copied = hf_sampler(policy, tiny.processor).generate(prompts, 8, params, step=0)
    lengths = set()
    for group, others in zip(groups, copied, strict=True):
        for rollout, other in zip(group, others, strict=True):
            assert rollout.segments[0].token_ids == other.segments[0].token_ids
            assert rollout.segments[0].logprobs == pytest.approx(other.segments[0].logprobs, abs=LOGPROBS)
            lengths.add(rollout.num_tokens)
    assert len(lengths) > 1
