"""Models and tokenizers from scratch and from folders, frozen components, and top-k and top-p sampling."""

import json
import subprocess
import sys

import pytest
import torch
from PIL import Image
from safetensors.torch import load, save
from transformers import TopKLogitsWarper, TopPLogitsWarper

from mmrl.config.schema import FromScratchConfig, LanguageFromScratchConfig, ModelConfig, VisionFromScratchConfig
from mmrl.policy.families import FAMILIES
from mmrl.policy.logprobs import sample_tokens
from mmrl.policy.policy import PolicyModel
from mmrl.policy.pretrained import ModelExport, load_pretrained
from mmrl.policy.tiny_models import make_model, make_processor, train_tokenizer
from mmrl.types import SamplingParams, UserError

COMPONENTS = ("vision", "projector", "language")
SPECIAL = ("<|im_start|>", "<|im_end|>", "<|vision_start|>", "<|vision_end|>", "<|image_pad|>", "<|endoftext|>")


@pytest.fixture(scope="module")
def tokenizer():
    return train_tokenizer(["How many red circles?", "<answer>3</answer>", "[12, 34, 56, 78]"] * 3, 330)


def make_spec(family, **options):
    vision = VisionFromScratchConfig(hidden_size=32, num_heads=2, intermediate_size=32)
    language = LanguageFromScratchConfig(hidden_size=48, intermediate_size=64, vocab_size=330)
    return FromScratchConfig(**{"family": family, "vision": vision, "language": language, **options})


def save_model(tokenizer, folder, family="qwen3_5", **more_weights):
    """Write a tiny model, its processor, and further weights in the model's file; return model and processor."""
    spec = make_spec(family)
    model, processor = make_model(spec, tokenizer, seed=1), make_processor(spec, tokenizer, (400, 2304))
    ModelExport(model, FAMILIES[family]).save_pretrained(folder)
    processor.save_pretrained(folder)
    if more_weights:
        change_weights(folder, lambda weights: weights.update(more_weights))
    return model, processor


def change_weights(folder, change):
    file = folder / "model.safetensors"
    weights = load(file.read_bytes())
    change(weights)
    file.write_bytes(save(weights, metadata={"format": "pt"}))


def load_from(folder, **options):
    return load_pretrained(ModelConfig(path=str(folder), **options))


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
def test_decoded_tokens_of_a_trained_tokenizer_are_the_text(tokenizer, text):
    assert tokenizer.decode(tokenizer(text, add_special_tokens=False).input_ids) == text


def test_special_tokens_are_single_and_tags_stay_in_the_text(tokenizer):
    ids = [tokenizer(token, add_special_tokens=False).input_ids for token in SPECIAL]
    assert len({token for (token,) in ids}) == len(SPECIAL)
    assert tokenizer.decode([token for (token,) in ids], skip_special_tokens=True) == ""
    assert tokenizer.eos_token == "<|im_end|>"
    tags = tokenizer("<answer>3</answer>", add_special_tokens=False).input_ids
    assert len(tags) == 3
    assert tokenizer.decode(tags, skip_special_tokens=True) == "<answer>3</answer>"


def test_banned_ids_are_all_structural_tokens_but_eos_and_embedding_rows_without_token(tokenizer):
    policy = PolicyModel(make_model(make_spec("qwen2_vl"), tokenizer, seed=1))
    banned = policy.banned_ids(tokenizer)
    assert {tokenizer.convert_tokens_to_ids(token) for token in SPECIAL} - {tokenizer.eos_token_id} < set(banned)
    assert tokenizer.eos_token_id not in banned
    assert banned == tuple(sorted(banned))
    without_token = range(len(tokenizer), len(tokenizer) + 3)
    policy.model.set_input_embeddings(torch.nn.Embedding(len(tokenizer) + 3, 48))
    assert policy.banned_ids(tokenizer) == (*banned, *without_token)


def model_inputs(model, processor):
    text = "<|vision_start|><|image_pad|><|vision_end|>How many?"
    image = Image.linear_gradient("L").resize((64, 48)).convert("RGB")
    inputs = processor(text=[text], images=[image], return_tensors="pt")
    return {**inputs, "mm_token_type_ids": (inputs["input_ids"] == model.config.image_token_id).int()}


@pytest.mark.parametrize("family", FAMILIES)
def test_a_new_model_computes_the_same_after_saving_and_loading(tokenizer, family, tmp_path):
    model, processor = save_model(tokenizer, tmp_path, family)
    loaded = load_from(tmp_path, dtype="float32", min_pixels=400, max_pixels=2304)
    assert type(loaded.model) is type(model)
    assert loaded.family.model_type == family
    ours, theirs = model_inputs(model, processor), model_inputs(loaded.model, loaded.processor)
    assert all(torch.equal(ours[name], theirs[name]) for name in ours.keys() | theirs.keys())
    with torch.no_grad():
        # To rounding: weights that are read from a file lie elsewhere in memory, and sums may take another order.
        torch.testing.assert_close(model.eval()(**ours).logits, loaded.model(**theirs).logits, rtol=0.0, atol=1e-6)
    assert loaded.processor.tokenizer.eos_token_id == tokenizer.eos_token_id


def test_a_loaded_model_has_the_dtype_attention_and_pixel_limits_of_the_config(tokenizer, tmp_path):
    save_model(tokenizer, tmp_path, "qwen2_5_vl")
    loaded = load_from(tmp_path, min_pixels=1000, max_pixels=1600, attn_implementation="eager")
    assert loaded.model.dtype is torch.bfloat16
    assert loaded.model.config._attn_implementation == "eager"
    grid = model_inputs(loaded.model, loaded.processor)["image_grid_thw"][0]
    assert 1000 <= int(grid.prod()) * 8 * 8 <= 1600


@pytest.mark.parametrize(
    ("config", "words"),
    [
        (None, "there is no folder .*; correct the path"),
        ({"model_type": "bert"}, "is a 'bert' model; mmrl trains qwen2_vl, qwen2_5_vl, qwen3_vl"),
        ({"model_type": "qwen4_exp"}, r"'qwen4_exp' model \(Qwen3.8-Flash-Next attends to .* without a GPU\); mmrl"),
    ],
)
def test_a_folder_without_a_known_model_is_refused(tmp_path, config, words):
    folder = tmp_path / "m"
    if config:
        folder.mkdir()
        (folder / "config.json").write_text(json.dumps(config))
    with pytest.raises(UserError, match=rf"model\.path: .*{words}"):
        load_from(folder)


def test_a_folder_with_damaged_or_missing_weights_is_refused(tokenizer, tmp_path):
    save_model(tokenizer, tmp_path, "qwen2_vl")
    file = tmp_path / "model.safetensors"
    content = file.read_bytes()
    file.write_bytes(content[: len(content) // 2])
    with pytest.raises(UserError, match=r"cannot load .*not fully covered"):
        load_from(tmp_path)
    file.write_bytes(content)
    change_weights(tmp_path, lambda weights: weights.pop("visual.merger.mlp.0.weight"))
    with pytest.raises(UserError, match=r"lacks 1 weights, model.visual.merger.mlp.0.weight for one; restore"):
        load_from(tmp_path)


@pytest.mark.parametrize("family", ["qwen3_vl_moe", "qwen3_5_moe"])
def test_a_folder_that_lacks_experts_is_refused(tokenizer, tmp_path, family):
    """Released folders of one family have a tensor for each expert, of the other one for all of a layer."""

    def remove_the_last_expert(weights):
        for name in list(weights):
            if ".experts.3." in name:
                del weights[name]
            elif name.endswith("experts.down_proj"):
                weights[name] = weights[name][:3].contiguous()

    save_model(tokenizer, tmp_path, family)
    change_weights(tmp_path, remove_the_last_expert)
    with pytest.raises(UserError, match=r"experts.down_proj for one: \[3, .*not \[4, .*; restore its files"):
        load_from(tmp_path)


def test_mtp_weights_are_counted_and_not_loaded(tokenizer, tmp_path):
    save_model(tokenizer, tmp_path, **{"mtp.fc.weight": torch.ones(2, 2), "mtp.norm.weight": torch.ones(2)})
    bundle = load_from(tmp_path)
    assert bundle.num_mtp_weights == 2
    (notice,) = bundle.iter_notices()
    assert "2 weights" in notice and "(mtp.*)" in notice


def set_ties(folder, *, top, text):
    config = json.loads((folder / "config.json").read_text())
    config["tie_word_embeddings"], config["text_config"]["tie_word_embeddings"] = top, text
    (folder / "config.json").write_text(json.dumps(config))


def test_a_tie_is_read_from_the_top_of_the_config(tokenizer, tmp_path):
    save_model(tokenizer, tmp_path)
    set_ties(tmp_path, top=False, text=True)
    with pytest.raises(UserError, match=r"lacks lm_head.weight, .* text_config.tie_word_embeddings is true"):
        load_from(tmp_path)
    set_ties(tmp_path, top=True, text=False)
    bundle = load_from(tmp_path)
    assert not [*bundle.iter_notices()]
    assert bundle.model.lm_head.weight is bundle.model.get_input_embeddings().weight


def test_an_output_matrix_that_differs_from_a_tied_embedding_is_kept_and_reported(tokenizer, tmp_path):
    other = torch.zeros(len(tokenizer), 48)
    save_model(tokenizer, tmp_path, **{"lm_head.weight": other})
    bundle = load_from(tmp_path, dtype="float32")
    assert torch.equal(bundle.model.lm_head.weight, other)
    (notice,) = bundle.iter_notices()
    assert "lm_head.weight differs from the embedding" in notice
    bundle.model.save_pretrained(tmp_path / "again")
    config = json.loads((tmp_path / "again" / "config.json").read_text())
    assert config["tie_word_embeddings"] is config["text_config"]["tie_word_embeddings"] is False


def test_a_seed_decides_the_weights_and_leaves_torchs_generator_as_it_is(tokenizer):
    torch.manual_seed(5)
    expected = torch.rand(3)
    torch.manual_seed(5)
    models = [make_model(make_spec("qwen2_vl"), tokenizer, seed=seed).state_dict() for seed in (1, 1, 2)]
    assert torch.equal(torch.rand(3), expected)
    assert all(torch.equal(models[0][name], models[1][name]) for name in models[0])
    assert any(not torch.equal(models[0][name], models[2][name]) for name in models[0])


@pytest.mark.parametrize(
    ("family", "other_family", "section", "change", "words"),
    [
        ("qwen2_vl", "qwen2_5_vl", "vision", {"intermediate_size": 48}, "48 must be a multiple of hidden_size 32"),
        # A folder would hold square matrices of experts, which could be read transposed.
        ("qwen3_vl_moe", "qwen3_5_moe", "language", {"expert_intermediate_size": 48}, "48 may be neither .* 48 nor"),
        ("qwen3_vl_moe", "qwen3_5_moe", "language", {"expert_intermediate_size": 24}, "48 may be neither .* 24 nor"),
    ],
)
def test_sizes_that_only_one_family_cannot_have_are_refused(tokenizer, family, other_family, section, change, words):
    changed = {section: getattr(make_spec(family), section).model_copy(update=change)}
    with pytest.raises(UserError, match=f"in {family}, .*{words}"):
        make_model(make_spec(family, **changed), tokenizer, seed=1)
    make_model(make_spec(other_family, **changed), tokenizer, seed=1)


@pytest.mark.parametrize("family", FAMILIES)
def test_each_component_has_parameters_and_vision_and_projector_are_in_the_tower(tokenizer, family):
    names_by_component = {component: [] for component in COMPONENTS}
    for name, _ in make_model(make_spec(family), tokenizer, seed=1).named_parameters():
        names_by_component[FAMILIES[family].component_of(name)].append(name)
    assert all(names_by_component.values())
    for component, names in names_by_component.items():
        assert {"visual" in name for name in names} == {component != "language"}


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("freeze", [(), ("vision",), ("projector",), ("language",), ("vision", "projector")])
def test_exactly_the_frozen_components_have_no_gradient(make_tiny, family, freeze):
    tiny = make_tiny(family)
    policy = PolicyModel(tiny.policy.model, freeze=freeze)
    batch = tiny.collate(tiny.experiences(tiny.samples[:1]))
    policy.compute_logprobs(batch).logprobs_N.sum().backward()
    trained, frozen = set(), []
    for name, parameter in policy.model.named_parameters():
        component = FAMILIES[family].component_of(name)
        if component in freeze:
            frozen.append(parameter)
            assert parameter.grad is None
        elif parameter.grad is not None and parameter.grad.any():
            trained.add(component)
    assert trained == set(COMPONENTS) - set(freeze)
    assert {component for component, own in policy.trained_by_component.items() if own} == trained
    assert len(policy.trainable) == sum(map(len, policy.trained_by_component.values()))
    assert len(policy.trainable) + len(frozen) == len(list(policy.model.parameters()))
    assert all(ours is theirs for ours, theirs in zip(policy.frozen.values(), frozen, strict=True))


def test_components_frozen_within_a_block_are_trained_and_encoded_anew_after_it(make_tiny):
    tiny = make_tiny("qwen2_5_vl")
    policy, tower = PolicyModel(tiny.policy.model), ("vision", "projector")
    names = list(policy.trainable)
    batch = tiny.collate(tiny.experiences(tiny.samples[:1]))

    with policy.freeze(tower):
        assert [component for component, own in policy.trained_by_component.items() if own] == ["language"]
        assert list(policy.trainable) == names
        copy = policy.frozen_copy()
        assert list(copy.trainable) == names
        assert not any(copy.trainable[name] is policy.trainable[name] for name in names)
        before = policy.compute_logprobs(batch).logprobs_N
        before.sum().backward()
        assert all(parameter.grad is None for name, parameter in policy.trainable.items() if "visual" in name)

    assert all(policy.trained_by_component.values())
    with torch.no_grad():
        for parameter in policy.trained_by_component["vision"]:
            parameter.mul_(1.5)
    after = policy.compute_logprobs(batch).logprobs_N
    assert (after - before).abs().max() > 1e-3
    with policy.freeze(tower):  # must not find features of the tower as it was
        torch.testing.assert_close(policy.compute_logprobs(batch).logprobs_N, after)


@pytest.mark.parametrize(("attention", "shares"), [("sdpa", True), ("eager", False)])
def test_prefixes_are_shared_unless_attention_is_eager(tokenizer, attention, shares):
    policy = PolicyModel(make_model(make_spec("qwen2_5_vl"), tokenizer, seed=1, attention=attention))
    assert policy.supports_shared_prefix == policy.frozen_copy().supports_shared_prefix == shares


@pytest.mark.parametrize(("top_k", "top_p"), [(3, 0.6), (2, 0.5), (4, 0.9), (0, 0.7), (3, 1.0)])
def test_top_k_and_top_p_keep_the_tokens_that_transformers_keeps(top_k, top_p):
    logits = torch.randn(200, 12, generator=torch.Generator().manual_seed(0))
    kept = TopKLogitsWarper(top_k)(None, logits) if top_k else logits
    kept = TopPLogitsWarper(top_p)(None, kept) if top_p < 1 else kept
    params = SamplingParams(top_k=top_k, top_p=top_p, max_new_tokens=1)
    uniforms = torch.linspace(0, 1 - 1e-9, 400, dtype=torch.float64)
    for row, allowed in zip(torch.log_softmax(logits, -1), kept, strict=True):
        sampled = set(sample_tokens(row.expand(400, -1), params, uniforms).tolist())
        assert sampled <= set(torch.isfinite(allowed).nonzero().flatten().tolist())
        if top_k <= 4 and top_p > 0.6:
            assert len(sampled) > 1 or torch.isfinite(allowed).sum() == 1


@pytest.mark.slow
def test_a_cpu_torch_works_beside_a_cuda_torchvision():
    pytest.importorskip("torchvision")
    code = "import mmrl.policy, torchvision, transformers; transformers.Qwen2VLForConditionalGeneration; print('ok')"
    done = subprocess.run([sys.executable, "-c", code], check=False, capture_output=True, text=True)
    assert done.stdout == "ok\n", done.stderr
