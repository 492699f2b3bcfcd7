"""An environment that counts actions, and at the second does the harm that `fault` names."""

import io
import os
import struct
import sys
import time
import zlib

from PIL import Image

from mmrl import ImageCrop, ImageRef, Observation, StepResult, Unscorable, UserError


class Counter:
    """Count actions; `begins` is the state of the first observation, "seed" for the seed, "error" for no beginning."""

    def __init__(self, first, fault, begins):
        self.first, self.fault, self.begins, self.count = first, fault, begins, 0

    def reset(self, sample, seed):
        self.sample = sample
        if self.begins == "error":
            raise ZeroDivisionError
        return Observation(text=self.first, state=str(seed) if self.begins == "seed" else self.begins)

    def step(self, action):
        self.count += 1
        if action == "slow":
            time.sleep(0.6)
        elif action in ("hang", "die"):
            FAULTS[action](self)
        if self.fault in FAULTS and self.count == 2:
            return FAULTS[self.fault](self)
        picture = draw(40 * self.count + (time.time_ns() if self.fault == "other" else 0))
        shown = Observation(text=f"{self.count} {str(action)[:20]}", media=(picture,), state=f"n{self.count}")
        ends = {"terminated": action == "stop", "truncated": action == "cut"}
        return StepResult(observation=shown, reward=0.5, valid=action != "bad", info={"count": self.count}, **ends)

    def close(self):
        pass


class Expert(Counter):
    def expert(self):
        return "go" if self.count < 2 else "stop"


def draw(shade):
    return encode(Image.new("RGB", (56, 56), tuple(shade.to_bytes(16, "little")[:3])))


def encode(picture):
    content = io.BytesIO()
    picture.save(content, "png")
    return content.getvalue()


def show(*media, text=""):
    return StepResult(observation=Observation(text=text, media=media))


def fail(env):
    raise KeyError("oops")


def abstain(env):
    raise Unscorable("no service")


def noise(env):
    sys.stdout.write("x" * 1000)
    return show(text="loud")


def forks(env):
    for _ in range(40):
        if os.fork() == 0:
            time.sleep(600)
    time.sleep(600)


def hungry(env):
    eaten = []
    while True:
        eaten.append(b"x" * 2**24)
        time.sleep(0.01)


def huge(env):
    """A PNG of few bytes that promises 20,000 x 20,000 pixels."""

    def chunk(kind, data):
        return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))

    header = struct.pack(">IIBBBBB", 20000, 20000, 8, 2, 0, 0, 0)
    chunks = chunk(b"IHDR", header) + chunk(b"IDAT", zlib.compress(bytes(100))) + chunk(b"IEND", b"")
    return show(b"\x89PNG\r\n\x1a\n" + chunks)


FAULTS = {
    "hang": lambda env: time.sleep(600),
    "die": lambda env: os._exit(3),
    "fail": fail,
    "abstain": abstain,
    "noise": noise,
    "forks": forks,
    "hungry": hungry,
    "huge": huge,
    "nan": lambda env: StepResult(reward=float("nan")),
    "wrong": lambda env: "words",
    "text_number": lambda env: show(text=3),
    "half": lambda env: show(text="You wrote \ud83d"),
    "no_picture": lambda env: show(b"GIF89a"),
    "broken_picture": lambda env: show(draw(1)[:60]),
    "look": lambda env: show(encode(Image.fromarray(env.sample.image(0)[:, ::-1]))),
    "outside": lambda env: show(ImageRef(path="/nowhere/page.png", sha256="0" * 64)),
    "no_such_medium": lambda env: show(ImageCrop(medium_number=9, box=(0, 0, 1, 1))),
    "text_box": lambda env: show(ImageCrop(medium_number=1, box=("0", "0", "9", "9"))),
}


def make(*, first: str = "", fault: str = "", begins: str | None = None, expert: bool = False):
    if fault == "missing":
        raise UserError("no such corpus")
    return (Expert if expert else Counter)(first, fault, begins)
