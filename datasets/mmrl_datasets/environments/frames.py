"""Look at more frames of a video before the answer, in FrameThinker's grammar.

A turn is a thought and an action:

    <think>..</think><action>choose frames between 120 and 480</action>    shows frames from between these two
    <think>..</think><action>get frame number at time 01:30</action>       says which frame is shown at that time
    <think>..</think><action>output answer: B</action>                     ends the episode

A look shows 8 frames of the sample's first video, or 12 of one of more than five minutes. The column `extra_info` has
`fps`, `total_frames` and `question`. For `mmrl_rewards.environment:success`, the last turn's `info` says whether the
answer is `correct`, the episode `chose` frames, and it was `timed`: it looked up a time, and the question names one.

These end the episode without success: a turn without exactly one thought and one action; an interval that was seen
before, holds no more frames than a look, or differs from the last two numbers of the thought; a time that is looked up
twice; and an action after a time that does not choose frames around it.

Source: FrameThinker, arXiv:2509.24304, think_with_video.py and think_with_video_reward.py. Departures: a broken rule
ends the episode at once, where the code scores it 0 at the end; intervals of a long video hold more than its 12 frames,
where the code takes 8; the numbers of the frames come after the last frame.
"""

from __future__ import annotations

import re
from typing import Final

import numpy as np

from mmrl.types import Environment, Observation, Sample, StepResult, Unscorable, VideoFrames

_LONG_SECONDS: Final = 300
_THOUGHT: Final = re.compile(r"<think>(.*?)</think>", re.DOTALL)
_ACTION: Final = re.compile(r"<action>(.*?)</action>", re.DOTALL)
_CONTENT: Final = re.compile(
    r"choose frames between (\d{1,9}) and (\d{1,9})|get frame number at time\s+(\d{1,3}):(\d{2})"
    r"|output answer:\s*(\S+)",
    re.ASCII,
)
_NUMBER: Final = re.compile(r"(?<![\w:])\d{1,9}(?![\w:])", re.ASCII)  # a number that is not part of a time
_BROKEN_RULE: Final = StepResult(terminated=True, valid=False, info={"correct": 0.0})


class FrameSearch(Environment):
    """One episode. It records the intervals that were shown, and the frame of each time that was looked up."""

    def reset(self, sample: Sample, seed: int) -> Observation:
        """Begin with the first look, which the question shows."""
        try:
            video = sample.meta["extra_info"]
            self.fps, self.num_frames = float(video["fps"]), int(video["total_frames"])
            self.asks_for_time = bool(re.search(r"[0-9]:[0-9]", video["question"]))
            if not (self.fps > 0 and self.num_frames > 0):
                raise ValueError(f"{self.num_frames} frames at {self.fps:g} a second")
        except (TypeError, KeyError, ValueError) as error:
            raise Unscorable(f"the column 'extra_info' must hold fps, total_frames and question: {error!r}") from error
        self.look_size = 12 if self.num_frames / self.fps > _LONG_SECONDS else 8
        self.answer = str(sample.target.value)
        self.seen = {(0, self.num_frames - 1)}
        self.times: dict[tuple[str, str], int] = {}  # frame of each time that was looked up
        self.expected_frame: int | None = None  # frame of the time that the last turn looked up
        return Observation()

    def step(self, action: str) -> StepResult:
        """Show the frames of an interval, return the frame number of a time, or end the episode."""
        thoughts, actions = _THOUGHT.findall(action), _ACTION.findall(action)
        content = _CONTENT.match(actions[0].strip()) if len(thoughts) == len(actions) == 1 else None
        if content is None:
            return _BROKEN_RULE
        start, end, minutes, seconds, answer = content.groups()
        if start is not None:
            return self._show(int(start), int(end), thoughts[0])
        if self.expected_frame is not None or (minutes, seconds) in self.times:
            return _BROKEN_RULE
        if minutes is not None:
            self.expected_frame = int((60 * int(minutes) + int(seconds)) * self.fps)
            self.times[minutes, seconds] = self.expected_frame
            return StepResult(
                observation=Observation(text=f"Frame number at time {minutes}:{seconds} is: {self.expected_frame}.")
            )
        timed = self.asks_for_time and bool(self.times)
        info = {"correct": answer == self.answer, "chose": len(self.seen) > 1, "timed": timed}
        return StepResult(terminated=True, info={name: float(value) for name, value in info.items()})

    def _show(self, start: int, end: int, thought: str) -> StepResult:
        stop = min(end, self.num_frames)
        is_new = (start, end) not in self.seen and stop - start > self.look_size
        holds_time = self.expected_frame is None or start <= self.expected_frame <= end
        if not (is_new and holds_time and list(map(int, _NUMBER.findall(thought)))[-2:] == [start, end]):
            return _BROKEN_RULE
        self.seen |= {(start, end), (start + 1, end - 1)}
        self.expected_frame = None
        frames = np.linspace(start + 1, stop - 1, self.look_size).astype(int).tolist()
        shown = VideoFrames(medium_number=1, seconds=tuple(frame / self.fps for frame in frames))
        return StepResult(observation=Observation(text=f"frames {', '.join(map(str, frames))}", media=(shown,)))


def make() -> Environment:
    """Make an episode."""
    return FrameSearch()
