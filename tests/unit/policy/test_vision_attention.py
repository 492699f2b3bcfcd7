"""Vision towers that attend to all windows at once, against the same towers as transformers runs them."""

import copy
import sys
from collections import Counter
from itertools import pairwise
from types import SimpleNamespace

import pytest
import torch
from processors import pad_prompts
from rounding import GRADIENTS

from mmrl.config.schema import FromScratchConfig, LanguageFromScratchConfig, VisionFromScratchConfig
from mmrl.policy import vision_attention
from mmrl.policy.families import FAMILIES
from mmrl.policy.policy import PolicyModel
from mmrl.policy.tiny_models import make_model, train_tokenizer
from mmrl.policy.vision_attention import PatchWindows

# Images and videos of one forward, as grids of time, height and width. The windows of Qwen2.5-VL are 8 x 8 patches.
IMAGE, WIDE, SMALL, VIDEO = (1, 16, 16), (1, 12, 20), (1, 4, 4), (3, 8, 12)
GRIDS = {
    "one image": [IMAGE],
    "equal images": [IMAGE, IMAGE],
    "mixed images": [WIDE, SMALL, IMAGE, WIDE],
    "video": [VIDEO],
    "videos": [VIDEO, (2, 20, 4), SMALL],
}
# Largest difference, over the largest value; the two sides have been bit-equal on an AMD EPYC.
EQUAL = 1e-6


@pytest.fixture(scope="module")
def tokenizer():
    return train_tokenizer(["How many red circles?"] * 3, 330)


def make_tiny_model(tokenizer, family, attention="sdpa"):
    """A model whose tower has windows in its first block, if its family has windows."""
    spec = FromScratchConfig(
        family=family,
        vision=VisionFromScratchConfig(hidden_size=32, num_heads=2, intermediate_size=32, num_layers=2),
        language=LanguageFromScratchConfig(hidden_size=48, intermediate_size=64, vocab_size=330),
    )
    model = make_model(spec, tokenizer, seed=1, attention=attention)
    tower = model.model.visual
    if family == "qwen2_5_vl":
        tower.fullatt_block_indexes, tower.window_size = [1], 8 * tower.patch_size
    return model


def two_towers(tokenizer, family, attention="sdpa"):
    """The tower as transformers runs it, and as a policy does; both project patches by a matrix product."""
    model = make_tiny_model(tokenizer, family, attention)
    by_transformers = copy.deepcopy(model.model.visual)
    projection = by_transformers.patch_embed.proj
    projection.forward = vision_attention._project_patches.__get__(projection)
    return by_transformers, PolicyModel(model).model.model.visual


def run(tower, grids):
    """Output, and gradients of patches and weights by name, of noise."""
    grids = torch.tensor(grids)
    config = tower.config
    generator = torch.Generator().manual_seed(0)
    width = 3 * config.temporal_patch_size * config.patch_size**2
    patches = torch.randn(int(grids.prod(dim=1).sum()), width, generator=generator).requires_grad_()
    tower.zero_grad()
    output = tower(patches, grid_thw=grids).pooler_output
    (output * torch.randn(output.shape, generator=generator)).sum().backward()
    gradients = {name: parameter.grad for name, parameter in tower.named_parameters() if parameter.grad is not None}
    return {"output": output.detach(), "patches": patches.grad, **gradients}


def largest_difference(found, expected):
    assert found.keys() == expected.keys()
    return max(float((found[name] - expected[name]).abs().max() / expected[name].abs().max()) for name in expected)


@pytest.fixture
def calls(monkeypatch):
    """Counts calls of SDPA by the shape of their queries."""
    shapes = Counter()
    attend = vision_attention.scaled_dot_product_attention

    def counted(query, *inputs, **options):
        shapes[tuple(query.shape)] += 1
        return attend(query, *inputs, **options)

    monkeypatch.setattr(vision_attention, "scaled_dot_product_attention", counted)
    return shapes


@pytest.mark.parametrize("recompute", [False, True], ids=["kept", "recomputed"])
@pytest.mark.parametrize("family", FAMILIES)
def test_outputs_and_gradients_are_those_of_transformers(tokenizer, family, recompute):
    by_transformers, ours = two_towers(tokenizer, family)
    if recompute:
        ours.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    for tower in (by_transformers, ours):
        tower.train()
    for grids in GRIDS.values():
        assert largest_difference(run(ours, grids), run(by_transformers, grids)) <= EQUAL


@pytest.mark.parametrize("family", FAMILIES)
def test_patches_are_projected_as_by_the_convolution(tokenizer, family, monkeypatch):
    projection = PolicyModel(make_tiny_model(tokenizer, family)).model.model.visual.patch_embed.proj.double()
    patches = torch.randn(7, *projection.weight.shape[1:], dtype=torch.float64, requires_grad=True)
    inputs = [patches, *projection.parameters()]
    expected = torch.nn.Conv3d.forward(projection, patches)
    expected_gradients = torch.autograd.grad(expected.square().sum(), inputs)
    monkeypatch.setattr(torch.nn.functional, "conv3d", lambda *_: pytest.fail("a convolution was computed"))
    found = projection(patches)
    torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(torch.autograd.grad(found.square().sum(), inputs), expected_gradients)


def test_windows_that_see_each_other_are_noticed(tokenizer, monkeypatch):
    by_transformers, ours = two_towers(tokenizer, "qwen2_5_vl")
    monkeypatch.setattr(vision_attention, "PatchWindows", lambda lengths, edges: PatchWindows((sum(lengths),), edges))
    assert largest_difference(run(ours, [IMAGE]), run(by_transformers, [IMAGE])) > 1000 * EQUAL


def test_an_eager_tower_stays_as_transformers_has_it(tokenizer, calls):
    by_transformers, ours = two_towers(tokenizer, "qwen2_5_vl", attention="eager")
    assert ours.config._attn_implementation == "eager"
    assert largest_difference(run(ours, GRIDS["mixed images"]), run(by_transformers, GRIDS["mixed images"])) <= EQUAL
    assert not calls


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("grids", [[IMAGE], [IMAGE] * 4, [(1, 32, 32)], [(5, 16, 16)]], ids=str)
def test_equal_windows_take_one_call_a_block(tokenizer, family, grids, calls):
    _, ours = two_towers(tokenizer, family)
    run(ours, grids)
    assert sum(calls.values()) == len(ours.blocks)
    if family == "qwen2_5_vl":
        patches = sum(time * height * width for time, height, width in grids)
        assert calls[patches // 64, 2, 64, 16] == 1


def test_mixed_windows_take_one_call_for_each_length(tokenizer, calls):
    _, ours = two_towers(tokenizer, "qwen2_5_vl")
    run(ours, [WIDE, SMALL, IMAGE, WIDE])
    # Windows of 8 x 8, 8 x 4 or 4 x 8, and 4 x 4 patches; then whole images.
    counts_by_length = {(length, count) for count, _, length, _ in calls}
    assert counts_by_length == {(64, 8), (32, 6), (16, 3), (240, 2), (16, 1), (256, 1)}


def attend_window_by_window(query, key, value, borders, key_borders, longest, longest_key):
    """Return what `varlen_attn` should: attention of [T, H, D] within each window."""
    assert borders is key_borders and borders.dtype == torch.int32
    assert longest == longest_key == borders.diff().max()
    outputs = []
    for start, end in pairwise(borders.tolist()):
        scores = torch.einsum("qhd,khd->hqk", query[start:end], key[start:end]) / query.shape[-1] ** 0.5
        outputs.append(torch.einsum("hqk,khd->qhd", scores.softmax(dim=-1), value[start:end]))
    return torch.cat(outputs)


@pytest.mark.parametrize("family", FAMILIES)
def test_the_variable_length_call_gets_the_windows_of_transformers(tokenizer, family, monkeypatch, calls):
    by_transformers, ours = two_towers(tokenizer, family)
    monkeypatch.setattr(vision_attention, "_find_varlen_kernel", lambda query: attend_window_by_window)
    for grids in GRIDS.values():
        # Another order of additions: up to 2e-6.
        assert largest_difference(run(ours, grids), run(by_transformers, grids)) <= 10 * EQUAL
    assert not calls


def test_the_variable_length_call_of_torch_takes_these_arguments(monkeypatch):
    varlen = pytest.importorskip("torch.nn.attention.varlen")  # came with torch 2.10
    monkeypatch.setattr(vision_attention, "_find_varlen_kernel", lambda query: varlen.varlen_attn)
    qkv = torch.empty(24, 3, 2, 16, dtype=torch.bfloat16, device="meta", requires_grad=True)
    query, key, value = (tensor.transpose(0, 1)[None] for tensor in qkv.unbind(1))
    windows = PatchWindows((4, 16, 4), torch.empty(4, dtype=torch.int32, device="meta"))
    options = {"scaling": 0.25, "cu_seq_lens_q": windows, "max_length_q": 16, "is_causal": False}
    output, _ = vision_attention.vision_attention(None, query, key, value, None, **options)
    output.sum().backward()
    assert output.shape == (1, 24, 2, 16) and qkv.grad.shape == qkv.shape


@pytest.mark.parametrize(
    ("is_cuda", "dtype", "expected"),
    [(True, torch.bfloat16, True), (True, torch.float32, False), (False, torch.bfloat16, False)],
)
def test_the_kernel_takes_half_precision_on_cuda(is_cuda, dtype, expected):
    varlen = pytest.importorskip("torch.nn.attention.varlen")
    found = vision_attention._find_varlen_kernel(SimpleNamespace(is_cuda=is_cuda, dtype=dtype))
    assert found is (varlen.varlen_attn if expected else None)


def test_a_torch_without_the_kernel_attends_by_length(monkeypatch):
    monkeypatch.setitem(sys.modules, "torch.nn.attention.varlen", None)
    assert vision_attention._find_varlen_kernel(SimpleNamespace(is_cuda=True, dtype=torch.bfloat16)) is None


def test_a_batch_moves_its_patches_and_keeps_its_grids(make_tiny):
    tiny = make_tiny()
    batch = pad_prompts([tiny.processor.build(tiny.samples[4])], tiny.processor, pad_id=tiny.eos_id)
    media = batch.to(torch.device("meta")).media
    assert media.image_patches_MD.is_meta and media.video_patches_MD.is_meta
    assert media.image_grids_I3.device.type == media.video_grids_V3.device.type == "cpu"


@pytest.mark.parametrize("family", FAMILIES)
def test_prefill_attends_in_one_call_a_block(make_tiny, family, calls):
    tiny = make_tiny(family)
    # An image and a video; two images of one size; a second prompt adds no calls.
    for samples, kinds in (([4], 2), ([0], 1), ([0, 0], 1)):
        calls.clear()
        prompts = [tiny.processor.build(tiny.samples[number]) for number in samples]
        tiny.policy.prefill(pad_prompts(prompts, tiny.processor, pad_id=tiny.eos_id))
        assert sum(calls.values()) == kinds * len(tiny.policy.model.model.visual.blocks)


def test_a_frozen_tower_runs_once_for_each_image(make_tiny, calls):
    tiny = make_tiny()
    batch = tiny.collate(tiny.experiences(tiny.samples[:2]))
    expected = tiny.policy.compute_logprobs(batch).logprobs_N
    frozen = PolicyModel(tiny.policy.model, freeze=("vision", "projector"))
    calls.clear()
    for _ in range(2):
        found = frozen.compute_logprobs(batch).logprobs_N
        assert (found - expected).abs().max() < GRADIENTS
        assert sum(calls.values()) == 3 * len(tiny.policy.model.model.visual.blocks)  # 3 images


def test_a_copy_runs_its_own_tower(make_tiny):
    policy = make_tiny().policy
    reference = policy.frozen_copy()
    before = run(policy.model.model.visual, [IMAGE])["output"]
    with torch.no_grad():
        policy.model.model.visual.patch_embed.proj.weight.zero_()
    patches = torch.randn(256, policy.patch_dim, generator=torch.Generator().manual_seed(0))
    assert torch.equal(reference.model.model.visual(patches, grid_thw=torch.tensor([IMAGE])).pooler_output, before)
    assert not torch.equal(run(policy.model.model.visual, [IMAGE])["output"], before)
