"""Samples to prompts as transformers makes them, digests and caches of prompts, and demonstrations."""

import pickle
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from config_samples import SMALL, write
from factories import image_ref, make_rollout, make_sample
from PIL import Image
from processors import make_media_cache
from selection import make_media_finder

from mmrl import types
from mmrl.config import load_config
from mmrl.policy.build import build_encoder
from mmrl.policy.encoder import ChatTemplate
from mmrl.policy.families import FAMILIES
from mmrl.policy.pretrained import ProcessorBundle

NUMBER = types.Target(answer_type=types.AnswerType.NUMBER, value=3)
WITHOUT_MEDIA = make_sample(parts=("nothing to see",))


@pytest.fixture
def write_image(tmp_path):
    def write_image(image, name="p.png"):
        image.save(tmp_path / name)
        return image_ref(tmp_path / name)

    return write_image


@pytest.fixture
def red_sample(write_image):
    return make_sample(parts=(write_image(Image.new("RGB", (48, 48), "red")), "?"))


@pytest.mark.parametrize("family", FAMILIES)
def test_a_prompt_is_what_the_processor_of_transformers_makes(make_tiny, family):
    tiny = make_tiny(family)
    for sample in tiny.samples[:3]:
        prompt = tiny.processor.build(sample)
        tensors = tiny.processor.prompt_tensors(prompt)
        content = []
        for part in sample.parts:
            if isinstance(part, types.ImageRef):
                content.append({"type": "image", "image": Image.open(part.path).convert("RGB")})
            else:
                content.append({"type": "text", "text": part})
        options = {"add_generation_prompt": True, "tokenize": True, "return_dict": True, "return_tensors": "pt"}
        question = [{"role": "user", "content": content}]
        theirs = tiny.processor.hf_processor.apply_chat_template(question, **options)
        assert list(prompt.token_ids) == theirs["input_ids"][0].tolist()
        if sample.images:
            assert torch.equal(tensors.image_patches_MD, theirs["pixel_values"])
            assert [list(grid) for grid in prompt.grids] == theirs["image_grid_thw"].tolist()
        else:
            assert tensors.image_patches_MD.shape == (0, 3 * 2 * 8 * 8)
        assert tensors.position_ids_3P.shape == (3, len(prompt.token_ids))
        assert len(prompt.resize_maps) == len(prompt.grids) == len(sample.images)


def test_a_resize_map_has_the_original_size_and_the_limited_one(make_tiny, write_image):
    sample = make_sample(parts=(write_image(Image.new("RGB", (96, 24))), "?"))
    (resize_map,) = make_tiny().processor.build(sample).resize_maps
    assert resize_map.original == types.Size(96, 24)
    assert resize_map.resized.width * resize_map.resized.height <= 2304
    assert resize_map.resized.width > resize_map.resized.height


def test_an_instruction_is_added_only_if_asked_for(tiny):
    for add_instruction in (False, True):
        text = tiny.fresh(add_instruction=add_instruction).encoder.render_chat(tiny.samples[0])
        assert ("Answer as <answer>" in text) == add_instruction


def test_a_chat_template_renders_and_tokenizes_a_question_once_and_can_be_pickled(make_tiny):
    hf_processor, calls = make_tiny().processor.hf_processor, []

    def apply_chat_template(messages, **options):
        calls.append("render")
        return hf_processor.apply_chat_template(messages, **options)

    def tokenizer(text):
        calls.append("tokenize")
        return hf_processor.tokenizer(text)

    counted = SimpleNamespace(apply_chat_template=apply_chat_template, tokenizer=tokenizer)
    template, question = ChatTemplate(counted, {}), (("image", ""), ("text", "How many?"))
    text = template.render(question)
    assert template.render(question) == text
    assert template.tokenize(text) == template.tokenize(text)
    assert calls == ["render", "tokenize"]
    others = [template.render((("video", ""), question[1])), template.render(question[1:])]
    assert len({text, *others}) == 3
    assert pickle.loads(pickle.dumps(ChatTemplate(hf_processor, {}))).render(question) == text


def test_a_digest_depends_on_each_pixel_and_on_the_text(tiny, write_image):
    image = Image.new("RGB", (48, 48), (10, 20, 30))
    sample = make_sample(parts=(write_image(image, "a.png"), "How many?"))
    image.putpixel((5, 7), (11, 20, 30))
    other_pixel = replace(sample, parts=(write_image(image, "b.png"), "How many?"))
    other_text = replace(sample, parts=(sample.parts[0], "How few?"))
    digests = [tiny.fresh().build(each).digest for each in (sample, sample, other_pixel, other_text)]
    assert digests[0] == digests[1]
    assert len(set(digests)) == 3


def test_samples_with_one_id_are_not_mixed_up(tiny):
    """Validation and test data may give the same ids to their rows."""
    samples = (tiny.samples[0], replace(tiny.samples[4], id=tiny.samples[0].id))
    processor = tiny.fresh()
    for sample in (*samples, samples[0]):
        alone, prompt = tiny.fresh(), processor.build(sample)
        assert prompt == alone.build(sample)
        patches = alone.prompt_tensors(prompt).image_patches_MD
        assert torch.equal(processor.prompt_tensors(prompt).image_patches_MD, patches)


@pytest.fixture
def forgetful(make_tiny, monkeypatch):
    """A processor that keeps the last prompt alone."""
    monkeypatch.setattr("mmrl.policy.processor._CACHE_BYTES", 1)
    return make_tiny().fresh()


def test_an_image_that_changes_during_the_run_is_refused_once_it_has_left_the_cache(forgetful, write_image, red_sample):
    processor = forgetful
    prompt = processor.build(red_sample)
    write_image(Image.new("RGB", (48, 48), "blue"))
    assert len(processor.prompt_tensors(prompt).image_patches_MD) == 36  # still cached
    processor.build(WITHOUT_MEDIA)  # takes its place
    with pytest.raises(types.UserError, match="changed since it was referenced"):
        processor.prompt_tensors(prompt)
    with pytest.raises(types.UserError, match=f"sample {prompt.sample.id}: its media changed while the run"):
        processor.prompt_tensors(replace(processor.build(WITHOUT_MEDIA), digest="0" * 64))


def make_finder(processor, warnings):
    return make_media_finder(processor.check_media, warnings.append)


def test_replayed_rollouts_whose_prompts_changed_are_found(forgetful, write_image, red_sample):
    warnings = []
    processor = forgetful
    find = make_finder(processor, warnings)
    prompt = processor.build(red_sample)
    siblings = [make_rollout(prompt, 0), make_rollout(prompt, 1)]
    assert find(siblings) == set()
    write_image(Image.new("RGB", (48, 48), "blue"))
    assert find(siblings) == set()  # the pixels are still cached
    processor.build(WITHOUT_MEDIA)
    assert find(siblings) == {(prompt.digest,)}
    assert len(warnings) == 1 and "sample s: " in warnings[0] and "changed since it was referenced" in warnings[0]
    other = replace(processor.build(WITHOUT_MEDIA), digest="0" * 64)
    assert find([make_rollout(other)]) == {("0" * 64,)}
    assert "its media changed while the run was using them" in warnings[1]


def test_a_replayed_rollout_is_found_by_a_page_that_changed_since_it_was_shown(tiny, write_image):
    warnings = []
    page = write_image(Image.new("RGB", (48, 48), "red"))
    rollout = make_rollout(tiny.processor.build(tiny.samples[0]))
    shown = replace(rollout, segments=(*rollout.segments, tiny.fresh().build_tool_segment(page)))
    assert make_finder(tiny.fresh(), warnings)([rollout, shown]) == set()
    write_image(Image.new("RGB", (48, 48), "blue"))
    assert make_finder(tiny.fresh(), warnings)([rollout, shown]) == {shown.media_digests}
    assert len(warnings) == 1 and str(page.path) in warnings[0]


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("index", [0, 1, 2], ids=["one image", "two images", "text"])
def test_a_prompt_that_is_too_long_is_refused_with_its_length(make_tiny, family, index):
    tiny = make_tiny(family)
    sample = tiny.samples[index]
    length = len(tiny.processor.build(sample).token_ids)
    assert len(tiny.fresh(max_prompt_tokens=length).encoder.measure(sample).ids) == length
    processor = tiny.fresh(max_prompt_tokens=length - 1)
    with pytest.raises(types.PromptTooLongError, match=f"{length} tokens exceed model.max_prompt_tokens={length - 1}"):
        processor.encoder.measure(sample)
    with pytest.raises(types.PromptTooLongError, match=rf"sample {sample.id}: {length} tokens exceed"):
        processor.build(sample)


@pytest.mark.parametrize("family", ["qwen3_vl", "qwen3_5", "qwen2_5_vl"])
@pytest.mark.parametrize("engine", ["vllm_server", "vllm"])
def test_a_video_that_a_vllm_server_cannot_take_is_refused(make_tiny, tmp_path, family, engine):
    tiny = make_tiny(family)
    config = load_config(write(tmp_path, SMALL), [f"rollout.engine={engine}"]).config
    bundle = ProcessorBundle(family=tiny.policy.family, processor=tiny.processor.hf_processor)
    encoder = build_encoder(config, bundle, make_media_cache())
    image, _, text, video, image_and_video, *_ = tiny.samples
    assert all(encoder.measure(sample).ids for sample in (image, text))
    for sample in (video, image_and_video):
        if engine == "vllm" or family == "qwen2_5_vl":
            assert encoder.measure(sample).ids
            continue
        with pytest.raises(types.UserError, match=f"rollout.engine: vLLM's server takes no video of {family}"):
            encoder.measure(sample)


@pytest.mark.parametrize("text", ["look: <|image_pad|>", "<|image_pad|>", "<|im_end|>\n<|im_start|>assistant\n"])
def test_a_special_token_in_the_question_is_refused(tiny, text):
    image = tiny.samples[0].images[0]
    for parts in ((image, text), (text, image), (text,), (text[:-5], text[-5:], image)):
        with pytest.raises(types.UserError, match="sample s: its text contains the special token"):
            tiny.fresh().build(make_sample(parts=parts))


def test_half_of_a_surrogate_pair_in_the_question_is_refused(make_tiny):
    with pytest.raises(types.UserError, match=r"sample s: its text contains '\\ud800', half of a surrogate pair"):
        make_tiny().fresh().build(make_sample(parts=("How \ud800?",)))


def test_a_prompt_that_left_the_cache_has_the_same_tensors_again(tiny, monkeypatch):
    roomy = tiny.fresh(store_bytes=10**8)
    monkeypatch.setattr("mmrl.policy.processor._CACHE_BYTES", 1)
    tight = tiny.fresh()
    prompts = [roomy.build(sample) for sample in tiny.samples]
    assert [tight.build(sample) for sample in tiny.samples] == prompts
    for prompt in [*prompts, *reversed(prompts)]:
        found, expected = tight.prompt_tensors(prompt), roomy.prompt_tensors(prompt)
        assert torch.equal(found.image_patches_MD, expected.image_patches_MD)
        assert torch.equal(found.position_ids_3P, expected.position_ids_3P)


@pytest.mark.parametrize("family", FAMILIES)
def test_a_demonstrated_box_is_in_the_coordinates_of_the_family(make_tiny, write_image, family):
    tiny = make_tiny(family)
    system = types.CoordinateSystem.PX_RESIZED if family == "qwen2_5_vl" else types.CoordinateSystem.NORM_1000
    prompt = tiny.processor.build(make_sample(parts=(write_image(Image.new("RGB", (96, 24))), "Where?")))
    box = make_sample(
        (24.0, 6.0, 48.0, 24.0), types.AnswerType.BOX, coordinate_system=types.CoordinateSystem.PX_ORIGINAL
    ).target
    rollout = tiny.processor.build_demonstration(prompt, box)
    width, height = (1000, 1000) if system is types.CoordinateSystem.NORM_1000 else prompt.resize_maps[0].resized
    assert prompt.coordinate_system is system
    assert rollout.answer.value == (round(width / 4), round(height / 4), round(width / 2), height)
    assert rollout.answer.problems == ()


def test_a_demonstration_is_the_text_and_eos_as_one_segment(tiny):
    rollout = tiny.processor.build_demonstration(tiny.processor.build(tiny.samples[0]), NUMBER)
    (segment,) = rollout.segments
    assert rollout.text == tiny.processor.decode(segment.token_ids) == "<answer>3</answer>"
    assert segment.author is types.Author.DEMONSTRATION
    assert segment.token_ids.index(tiny.eos_id) == len(segment.token_ids) - 1
    assert rollout.finish_reason is types.FinishReason.EOS
    assert len(segment.logprobs) == len(segment.token_ids) == rollout.sampling_params.max_new_tokens


def test_special_tokens_in_a_demonstration_are_plain_text(tiny):
    """What an annotator writes must neither end the response nor stand for an image."""
    prompt = tiny.processor.build(tiny.samples[0])
    answer = types.Target(answer_type=types.AnswerType.TEXT, value="a <|image_pad|> and <|im_end|>")
    (segment,) = tiny.processor.build_demonstration(prompt, answer).segments
    assert tiny.processor.placeholders.image_id not in segment.token_ids
    assert segment.token_ids.count(tiny.eos_id) == 1
    assert tiny.processor.decode(segment.token_ids) == "<answer>a <|image_pad|> and <|im_end|></answer>"
    assert tiny.fresh().build(tiny.samples[0]).token_ids == prompt.token_ids  # the tokenizer's option is reset


def tokens_of(tiny, text):
    """Return a rollout of a text, an EOS and, split over two segments, all its tokens."""
    prompt = tiny.processor.build(tiny.samples[0])
    ids = (*tiny.processor.tokenize(text), tiny.eos_id)
    parts = [
        types.Segment(token_ids=part, logprobs=(-1.0,) * len(part), author=types.Author.POLICY)
        for part in (ids[:3], ids[3:])
    ]
    return replace(make_rollout(prompt, 0, tiny.processor.decode(ids)), segments=tuple(parts))


@pytest.mark.parametrize("text", ["so it is 3", "naïve 数 🙂 3", "🙂", "a\ufffdb", " \n\t<answer>3</answer>"])
def test_each_token_ends_where_its_text_does(tiny, text):
    rollout = tokens_of(tiny, text)
    ends = tiny.processor.find_token_ends(rollout)
    ids = [token_id for segment in rollout.segments for token_id in segment.token_ids]
    assert len(ends) == len(ids) and ends == sorted(ends) and ends[-1] == len(text)
    for count, end in enumerate(ends, 1):
        # A character of which some bytes are missing counts from its last token on.
        assert tiny.processor.decode(ids[:count]).startswith(text[:end])


def test_tokens_that_do_not_spell_the_text_have_no_places(tiny):
    rollout = tokens_of(tiny, "so it is 3")
    assert tiny.processor.find_token_ends(replace(rollout, text="so it is 4")) is None


def test_a_prompt_is_rendered_with_its_placeholders_folded(tiny):
    prompt = tiny.processor.build(next(sample for sample in tiny.samples if sample.images))
    count = prompt.token_ids.count(tiny.processor.placeholders.image_id)
    rendered = tiny.processor.render_prompt(prompt)
    assert f"<|vision_start|>⟨image: {count} tokens⟩<|vision_end|>" in rendered and "image_pad" not in rendered
