"""A config whose samples are of every kind: text, one picture, two, a video, a picture and a video."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from harness import experiment
from PIL import Image
from videos import write_video

KINDS = ("text", "picture", "pictures", "video", "both")


def turn(*content: dict[str, Any]) -> dict[str, Any]:
    return {"role": "user", "content": list(content)}


def text(words: str) -> dict[str, Any]:
    return {"type": "text", "text": words}


def picture(name: str) -> dict[str, Any]:
    return {"type": "image_url", "image_url": {"url": name}}


REWARD = '''
from mmrl_rewards.contract import reward

@reward(name="letters")
def letters(response, sample):
    """How many different letters there are: nothing a model must learn, only different from rollout to rollout."""
    return min(1.0, len(set(response.text)) / 20)
'''
VIDEO = {"type": "video_url", "video_url": {"url": "clip.mp4"}}


def mixed_config(folder: Path, from_scratch: dict[str, Any], **sections: Any) -> dict[str, Any]:
    """A run on four rows of each kind, in OpenAI's messages, beside their media."""
    for name, colour in (("red.png", "red"), ("blue.png", "blue")):
        Image.new("RGB", (40, 32), colour).save(folder / name)
    write_video(folder / "clip.mp4", range(24), size=(64, 32))
    questions = {
        "text": turn(text("How many legs has a spider?")),
        "picture": turn(picture("red.png"), text("How many colours?")),
        "pictures": turn(picture("red.png"), text("and"), picture("blue.png"), text("How many colours?")),
        "video": turn(VIDEO, text("How many squares run?")),
        "both": turn(text("Is"), picture("blue.png"), text("in"), VIDEO, text("? How often?")),
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
        model={"from_scratch": from_scratch, "dtype": "float32", "device": "cpu", **pixels, "video": pixels},
        data={"train": [{"fn": "mmrl_datasets.readers.chat:rows", "args": rows}]},
        rewards={"terms": [{"fn": "./letters.py:letters"}]},
        **sections,
    )
