"""Text, one image, two images, a video, an image and a video: all in one run, from YAML to new weights."""

import json
from collections import Counter

import pytest
from harness import TINY, experiment, metrics, rl_stage, run_mmrl, sft_stage, succeed, write
from PIL import Image
from rounding import LOGPROBS
from videos import write_video

from mmrl.policy.families import FAMILIES

pytestmark = pytest.mark.slow

FAST = ("qwen2_vl", "qwen2_5_vl", "qwen3_vl")
KINDS = ("text", "image", "images", "video", "both")


def user_turn(*content):
    return {"role": "user", "content": list(content)}


def text(words):
    return {"type": "text", "text": words}


def image(name):
    return {"type": "image_url", "image_url": {"url": name}}


REWARD = '''
from mmrl_rewards.contract import reward

@reward(name="letters")
def letters(response, sample):
    """How many different letters there are: nothing a model must learn, only different from rollout to rollout."""
    return min(1.0, len(set(response.text)) / 20)
'''
VIDEO = {"type": "video_url", "video_url": {"url": "clip.mp4"}}


def mixed(folder, scratch, **sections):
    """A run on four rows of each kind, in OpenAI's messages, beside their media."""
    for name, colour in (("red.png", "red"), ("blue.png", "blue")):
        Image.new("RGB", (40, 32), colour).save(folder / name)
    write_video(folder / "clip.mp4", range(24), size=(64, 32))
    questions = {
        "text": user_turn(text("How many legs has a spider?")),
        "image": user_turn(image("red.png"), text("How many colours?")),
        "images": user_turn(image("red.png"), text("and"), image("blue.png"), text("How many colours?")),
        "video": user_turn(VIDEO, text("How many squares run?")),
        "both": user_turn(text("Is"), image("blue.png"), text("in"), VIDEO, text("? How often?")),
    }
    lines = [
        {"id": f"{kind}-{number}", "messages": [questions[kind], {"role": "assistant", "content": str(number)}]}
        for number in range(4)
        for kind in KINDS
    ]
    (folder / "rows.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    (folder / "letters.py").write_text(REWARD)
    rows = {"path": "rows.jsonl", "columns": {"id": "id", "turns": "messages"}, "answer_type": "number"}
    pixels = {"min_pixels": 1024, "max_pixels": 2048}
    return experiment(
        folder / "run",
        model={"from_scratch": scratch, "dtype": "float32", "device": "cpu", **pixels, "video": pixels},
        data={"train": [{"fn": "mmrl_datasets.readers.chat:rows", "args": rows}]},
        rewards={"terms": [{"fn": "./letters.py:letters"}]},
        **sections,
    )


@pytest.mark.parametrize(
    "family", [*FAST, *(pytest.param(family, marks=pytest.mark.slow) for family in FAMILIES if family not in FAST)]
)
def test_every_kind_of_sample_trains_in_one_batch(tmp_path, family):
    train_mixed(tmp_path, family)


def test_decord_gives_the_metrics_of_pyav(tmp_path):
    """In the process itself and in workers: the same frames give the same numbers."""
    pytest.importorskip("decord")
    numbers = []
    for reader, workers in (("pyav", 0), ("decord", 1)):
        folder = tmp_path / reader
        folder.mkdir()
        train_mixed(folder, "qwen2_5_vl", reader=reader, workers=workers)
        numbers.append(metrics(folder / "run"))
    assert numbers[0] == numbers[1]


def train_mixed(tmp_path, family, *, reader="pyav", workers=0):
    config = mixed(
        tmp_path,
        {**TINY, "family": family, "language": {**TINY["language"], "num_layers": 2}},
        stages=[
            sft_stage(steps=2, prompts_per_step=10, target_field="target"),
            rl_stage(steps=2, prompts_per_step=20, group_size=2, loss={"kl": {"coef": 0.05}}),
        ],
    )
    config["logging"]["rollouts"]["every"] = 1
    config["media"] = {"video_reader": reader}
    config["data"]["media_workers"] = workers
    succeed(run_mmrl("train", write(config, tmp_path / "mixed.yaml")))
    records = [record for record in metrics(tmp_path / "run") if "learner/loss" in record]
    assert len(records) == 4
    assert all(record["learner/grad_norm"] > 0 for record in records)
    assert all(record["rollout/logprob_diff_mean"] < LOGPROBS for record in records[2:])
    kept = (tmp_path / "run" / "rollouts" / "rl-000001.jsonl").read_text().splitlines()
    kinds = Counter(json.loads(line)["sample"].rsplit("/", 1)[1].partition("-")[0] for line in kept)
    assert kinds == dict.fromkeys(KINDS, 8)
