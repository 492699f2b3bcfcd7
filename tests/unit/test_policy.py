"""Models: made from nothing, saved and loaded, frozen by role; the law of drawing; a CPU torch at home."""

import json
import subprocess
import sys
from importlib.util import find_spec

import pytest
import torch
from PIL import Image
from safetensors.torch import load, save
from transformers import TopKLogitsWarper, TopPLogitsWarper

from mmrl.config.schema import FromScratchConfig, LanguageFromScratchConfig, ModelConfig, VisionFromScratchConfig
from mmrl.policy.batch import collate
from mmrl.policy.families import FAMILIES
from mmrl.policy.logprobs import sample_tokens
from mmrl.policy.policy import Policy, banned_ids
from mmrl.policy.pretrained import ModelExport, load_pretrained
from mmrl.policy.tiny_models import make_model, make_processor, train_tokenizer
from mmrl.types import Experience, SamplingParams, UserError

NAMES = tuple(FAMILIES)
ROLES = ("vision", "projector", "language")
SPECIAL = ("<|im_start|>", "<|im_end|>", "<|vision_start|>", "<|vision_end|>", "<|image_pad|>", "<|endoftext|>")


@pytest.fixture(scope="module")
def tokenizer():
    return train_tokenizer(["How many red circles?", "<answer>3</answer>", "[12, 34, 56, 78]"] * 3, 330)


def spec(family, **options):
    vision, language = (
        VisionFromScratchConfig(hidden_size=32, num_heads=2, intermediate_size=32),
        LanguageFromScratchConfig(hidden_size=48, intermediate_size=64, vocab_size=330),
    )
    return FromScratchConfig(**({"family": family, "vision": vision, "language": language} | options))


@pytest.mark.parametrize(
    "text",
    [
        "How many red circles?",
        " two  spaces , and a comma\t\n\r\n",
        "n't it's e\u0301 \u212b \u00e9",  # composed and not
        "日本語 עברית Ελληνικά \U0001d518 \U0001f469\u200d\U0001f467",
        "\x00\x1f\x7f\u0085\u2028\ufeff\uffff\U0010ffff",
        "<think> a < b </think><answer>\n3 </answer>",
        "".join(map(chr, range(32, 0x250))),
    ],
)
def test_any_text_comes_back_from_its_tokens(tokenizer, text):
    ids = tokenizer(text, add_special_tokens=False).input_ids
    assert tokenizer.decode(ids) == text
    assert max(ids) < len(tokenizer)


def test_special_tokens_are_one_token_each_and_vanish_from_responses(tokenizer):
    ids = [tokenizer(token, add_special_tokens=False).input_ids for token in SPECIAL]
    assert all(len(each) == 1 for each in ids)
    assert len({each[0] for each in ids}) == len(SPECIAL)
    assert tokenizer.decode([each[0] for each in ids], skip_special_tokens=True) == ""
    assert tokenizer.convert_ids_to_tokens(tokenizer.eos_token_id) == "<|im_end|>"
    tags = tokenizer("<answer>3</answer>", add_special_tokens=False).input_ids
    assert len(tags) == 3
    assert tokenizer.decode(tags, skip_special_tokens=True) == "<answer>3</answer>"


def test_everything_structural_but_the_end_is_banned(tokenizer):
    banned = banned_ids(tokenizer, len(tokenizer))
    expected = {tokenizer.convert_tokens_to_ids(token) for token in SPECIAL} - {tokenizer.eos_token_id}
    assert expected < set(banned)
    assert tokenizer.eos_token_id not in banned
    assert banned == tuple(sorted(banned))
    rows_of_no_token = range(len(tokenizer), len(tokenizer) + 3)
    assert set(banned_ids(tokenizer, len(tokenizer) + 3)) == {*banned, *rows_of_no_token}


def inputs(model, processor):
    text = "<|vision_start|><|image_pad|><|vision_end|>How many?"
    made = processor(
        text=[text], images=[Image.linear_gradient("L").resize((64, 48)).convert("RGB")], return_tensors="pt"
    )
    return {**made, "mm_token_type_ids": (made["input_ids"] == model.config.image_token_id).int()}


@pytest.mark.parametrize("family", NAMES)
def test_a_model_from_nothing_survives_a_folder(tokenizer, family, tmp_path):
    model, processor = (
        make_model(spec(family), tokenizer, seed=1).eval(),
        make_processor(spec(family), tokenizer, (400, 2304)),
    )
    model.save_pretrained(tmp_path)
    processor.save_pretrained(tmp_path)
    loaded = load_pretrained(ModelConfig(path=str(tmp_path), dtype="float32", min_pixels=400, max_pixels=2304))
    assert type(loaded.model) is type(model)
    assert loaded.family.model_type == family
    ours, theirs = inputs(model, processor), inputs(loaded.model, loaded.processor)
    assert ours.keys() == theirs.keys()
    assert all(torch.equal(ours[name], theirs[name]) for name in ours)
    with torch.no_grad():
        # To rounding: weights that are read from a file lie elsewhere in memory, and sums may take another order.
        torch.testing.assert_close(model(**ours).logits, loaded.model(**theirs).logits, rtol=0.0, atol=1e-6)
    assert loaded.processor.tokenizer.eos_token_id == tokenizer.eos_token_id


def test_a_loaded_model_keeps_to_the_types_and_pixels_asked_for(tokenizer, tmp_path):
    make_model(spec("qwen2_5_vl"), tokenizer, seed=1).save_pretrained(tmp_path)
    make_processor(spec("qwen2_5_vl"), tokenizer, (400, 2304)).save_pretrained(tmp_path)
    loaded = load_pretrained(
        ModelConfig(path=str(tmp_path), min_pixels=1000, max_pixels=1600, attn_implementation="eager")
    )
    assert loaded.model.dtype is torch.bfloat16
    assert loaded.model.config._attn_implementation == "eager"
    grid = inputs(loaded.model, loaded.processor)["image_grid_thw"][0]
    assert 1000 <= int(grid.prod()) * 8 * 8 <= 1600


def test_a_folder_that_is_no_model_is_refused(tokenizer, tmp_path):
    def attempt():
        load_pretrained(ModelConfig(path=str(tmp_path / "m")))

    with pytest.raises(UserError, match=r"model\.path: there is no folder .*; correct the path"):
        attempt()
    (tmp_path / "m").mkdir()
    (tmp_path / "m" / "config.json").write_text('{"model_type": "bert"}')
    with pytest.raises(UserError, match="is a 'bert' model; mmrl trains qwen2_vl, qwen2_5_vl, qwen3_vl"):
        attempt()
    (tmp_path / "m" / "config.json").write_text('{"model_type": "qwen4_exp"}')
    with pytest.raises(UserError, match=r"'qwen4_exp' model \(Qwen3.8-Flash-Next attends to .* without a GPU\); mmrl"):
        attempt()
    make_model(spec("qwen2_vl"), tokenizer, seed=1).save_pretrained(tmp_path / "m")
    make_processor(spec("qwen2_vl"), tokenizer, (400, 2304)).save_pretrained(tmp_path / "m")
    attempt()
    weights = tmp_path / "m" / "model.safetensors"
    whole = weights.read_bytes()
    weights.write_bytes(whole[: len(whole) // 2])
    with pytest.raises(UserError, match=r"cannot load .*not fully covered"):
        attempt()
    tensors = load(whole)
    (lost,) = [name for name in tensors if name.endswith("merger.mlp.0.weight")]
    del tensors[lost]
    weights.write_bytes(save(tensors, metadata={"format": "pt"}))
    with pytest.raises(
        UserError, match=r"lacks 1 weights, model.visual.merger.mlp.0.weight for one; restore its files"
    ):
        attempt()


@pytest.mark.parametrize("family", ["qwen3_vl_moe", "qwen3_5_moe"])
def test_a_folder_that_lacks_experts_is_refused(tokenizer, tmp_path, family):
    """Released folders of one family have a tensor for each expert, of the other one for all of a layer."""
    model = make_model(spec(family), tokenizer, seed=1)
    ModelExport(model, FAMILIES[family]).save_pretrained(tmp_path)
    make_processor(spec(family), tokenizer, (400, 2304)).save_pretrained(tmp_path)
    weights = tmp_path / "model.safetensors"
    kept = {name: tensor for name, tensor in load(weights.read_bytes()).items() if ".experts.3." not in name}
    for name in kept:
        if name.endswith("experts.down_proj"):
            kept[name] = kept[name][:3].contiguous()
    weights.write_bytes(save(kept, metadata={"format": "pt"}))
    with pytest.raises(UserError, match=r"experts.down_proj for one: \[3, .*not \[4, .*; restore its files"):
        load_pretrained(ModelConfig(path=str(tmp_path)))


def save_tiny(tokenizer, folder, family="qwen3_5", **weights):
    """A tiny model's folder with further weights in its file."""
    model = make_model(spec(family), tokenizer, seed=1)
    model.save_pretrained(folder)
    make_processor(spec(family), tokenizer, (400, 2304)).save_pretrained(folder)
    file = folder / "model.safetensors"
    file.write_bytes(save({**load(file.read_bytes()), **weights}, metadata={"format": "pt"}))
    return model


def test_weights_that_predict_several_tokens_are_counted_and_left_out(tokenizer, tmp_path):
    save_tiny(tokenizer, tmp_path, **{"mtp.fc.weight": torch.ones(2, 2), "mtp.norm.weight": torch.ones(2)})
    bundle = load_pretrained(ModelConfig(path=str(tmp_path)))
    assert bundle.num_mtp_weights == 2
    (notice,) = bundle.iter_notices()
    assert "2 weights" in notice and "(mtp.*)" in notice and "the exported model lacks them" in notice


def set_ties(folder, *, top, text):
    config = json.loads((folder / "config.json").read_text())
    config["tie_word_embeddings"], config["text_config"]["tie_word_embeddings"] = top, text
    (folder / "config.json").write_text(json.dumps(config))


def test_a_tie_that_is_declared_in_the_wrong_place_is_named(tokenizer, tmp_path):
    save_tiny(tokenizer, tmp_path)
    set_ties(tmp_path, top=False, text=True)
    with pytest.raises(
        UserError, match=r"lacks lm_head.weight, .* text_config.tie_word_embeddings is true, .* to true"
    ):
        load_pretrained(ModelConfig(path=str(tmp_path)))
    set_ties(tmp_path, top=True, text=False)
    bundle = load_pretrained(ModelConfig(path=str(tmp_path)))
    assert not [*bundle.iter_notices()]
    assert bundle.model.lm_head.weight is bundle.model.get_input_embeddings().weight


def test_an_output_matrix_beside_a_tie_is_kept_and_told_of(tokenizer, tmp_path):
    other = torch.zeros(len(tokenizer), spec("qwen3_5").language.hidden_size)
    save_tiny(tokenizer, tmp_path, **{"lm_head.weight": other})
    bundle = load_pretrained(ModelConfig(path=str(tmp_path), dtype="float32"))
    assert torch.equal(bundle.model.lm_head.weight, other)
    (notice,) = bundle.iter_notices()
    assert "lm_head.weight differs from the embedding" in notice
    bundle.model.save_pretrained(tmp_path / "again")
    config = json.loads((tmp_path / "again" / "config.json").read_text())
    assert config["tie_word_embeddings"] is config["text_config"]["tie_word_embeddings"] is False


def test_a_seed_makes_the_model_and_leaves_the_generator_alone(tokenizer):
    torch.manual_seed(5)
    expected = torch.rand(3)
    torch.manual_seed(5)
    models = [make_model(spec("qwen2_vl"), tokenizer, seed=seed).state_dict() for seed in (1, 1, 2)]
    assert torch.equal(torch.rand(3), expected)
    assert all(torch.equal(models[0][name], models[1][name]) for name in models[0])
    assert any(not torch.equal(models[0][name], models[2][name]) for name in models[0])


def test_a_vision_tower_that_qwen2_vl_cannot_have_is_refused(tokenizer):
    odd = spec("qwen2_vl", vision=VisionFromScratchConfig(hidden_size=32, num_heads=2, intermediate_size=48))
    with pytest.raises(UserError, match="in qwen2_vl, intermediate_size 48 must be a multiple of hidden_size 32"):
        make_model(odd, tokenizer, seed=1)
    make_model(odd.model_copy(update={"family": "qwen2_5_vl"}), tokenizer, seed=1)


@pytest.mark.parametrize("width", [48, 24], ids=["down_proj", "gate_up_proj"])
def test_square_experts_which_no_folder_can_hold_are_refused(tokenizer, width):
    language = spec("qwen3_vl_moe").language.model_copy(update={"expert_intermediate_size": width})
    with pytest.raises(UserError, match=f"hidden_size 48 may be neither expert_intermediate_size {width} nor twice"):
        make_model(spec("qwen3_vl_moe", language=language), tokenizer, seed=1)
    make_model(spec("qwen3_5_moe", language=language), tokenizer, seed=1)


@pytest.mark.parametrize("family", NAMES)
def test_every_role_has_parameters_and_every_parameter_a_role(tokenizer, family):
    named = dict(make_model(spec(family), tokenizer, seed=1).named_parameters())
    of = {role: {name for name in named if FAMILIES[family].component_of(name) == role} for role in ROLES}
    assert all(of.values())
    assert sum(map(len, of.values())) == len(named)
    assert all("visual" in name for name in of["vision"] | of["projector"])
    assert not any("visual" in name for name in of["language"])


@pytest.mark.parametrize("family", NAMES)
@pytest.mark.parametrize("freeze", [(), ("vision",), ("projector",), ("language",), ("vision", "projector")])
def test_frozen_roles_have_exactly_no_gradient(make_tiny, family, freeze):
    tiny = make_tiny(family)
    policy = Policy(tiny.policy.model, freeze=freeze)
    prompt = tiny.processor.build(tiny.samples[0])
    rollout = tiny.sampler().generate([prompt], 1, tiny.params, step=0)[0][0]
    batch = collate([[Experience(rollout=rollout, advantage=1.0)]], tiny.processor, pad_id=tiny.eos_id)
    policy.compute_logprobs(batch).logprobs_N.sum().backward()
    moved = {
        FAMILIES[family].component_of(name)
        for name, p in policy.model.named_parameters()
        if p.grad is not None and p.grad.any()
    }
    assert moved == set(ROLES) - set(freeze)
    frozen = [p for name, p in policy.model.named_parameters() if FAMILIES[family].component_of(name) in freeze]
    assert all(p.grad is None for p in frozen)
    assert {role for role, own in policy.trained_by_component.items() if own} == moved
    assert len(policy.trained) == sum(map(len, policy.trained_by_component.values()))
    assert len(policy.trained) + len(policy.frozen) == len(list(policy.model.parameters()))
    assert all(a is b for a, b in zip(policy.frozen.values(), frozen, strict=True))


def test_parts_are_frozen_for_a_time(make_tiny):
    tiny = make_tiny("qwen2_5_vl")
    policy, tower = Policy(tiny.policy.model), ("vision", "projector")
    names = list(policy.trained)
    prompt = tiny.processor.build(tiny.samples[0])
    rollout = tiny.sampler().generate([prompt], 1, tiny.params, step=0)[0][0]
    batch = collate([[Experience(rollout=rollout, advantage=1.0)]], tiny.processor, pad_id=tiny.eos_id)

    with policy.freeze(tower):
        assert [role for role, own in policy.trained_by_component.items() if own] == ["language"]
        assert list(policy.trained) == names
        copy = policy.frozen_copy()
        assert list(copy.trained) == names
        assert not any(copy.trained[name] is policy.trained[name] for name in names)
        earlier = policy.compute_logprobs(batch).logprobs_N
        earlier.sum().backward()
        assert all(p.grad is None for name, p in policy.trained.items() if "visual" in name)

    assert all(policy.trained_by_component.values())
    with torch.no_grad():
        for parameter in policy.trained_by_component["vision"]:
            parameter.mul_(1.5)
    exact = policy.compute_logprobs(batch).logprobs_N
    assert (exact - earlier).abs().max() > 1e-3
    with policy.freeze(tower):  # the features of the tower as it was must be gone
        torch.testing.assert_close(policy.compute_logprobs(batch).logprobs_N, exact)


def test_prefixes_are_shared_with_any_attention_but_eager(tokenizer):
    for attention, shares in (("sdpa", True), ("eager", False)):
        policy = Policy(make_model(spec("qwen2_5_vl"), tokenizer, seed=1, attention=attention))
        assert policy.supports_shared_prefix == policy.frozen_copy().supports_shared_prefix == shares


@pytest.mark.parametrize(("top_k", "top_p"), [(3, 0.6), (2, 0.5), (4, 0.9), (0, 0.7), (3, 1.0)])
def test_truncation_keeps_what_transformers_keeps(top_k, top_p):
    logits = torch.randn(200, 12, generator=torch.Generator().manual_seed(0))
    kept = logits
    if top_k:
        kept = TopKLogitsWarper(top_k)(None, kept)
    if top_p < 1:
        kept = TopPLogitsWarper(top_p)(None, kept)
    params = SamplingParams(top_k=top_k, top_p=top_p, max_new_tokens=1)
    uniforms = torch.linspace(0, 1 - 1e-9, 400, dtype=torch.float64)
    for row, allowed in zip(torch.log_softmax(logits, -1), kept, strict=True):
        drawn = set(sample_tokens(row.expand(400, -1), params, uniforms).tolist())
        assert drawn <= set(torch.isfinite(allowed).nonzero().flatten().tolist())
        if top_k <= 4 and top_p > 0.6:
            assert len(drawn) > 1 or torch.isfinite(allowed).sum() == 1


def test_a_cpu_torch_lives_beside_a_cuda_torchvision():
    if find_spec("torchvision") is None:
        pytest.skip("torchvision is not installed")
    code = "import mmrl.policy, torchvision, transformers; transformers.Qwen2VLForConditionalGeneration; print('ok')"
    done = subprocess.run([sys.executable, "-c", code], check=False, capture_output=True, text=True)
    assert done.stdout == "ok\n", done.stderr
