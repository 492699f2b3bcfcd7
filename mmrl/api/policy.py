"""`mmrl.Policy`: a trained model that answers single questions, prompted as in training."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Final, TypeAlias

from mmrl.config import check_overrides
from mmrl.types import AnswerType, CoordinateSystem, MediaRef, Region, Response, Sample, Target, UserError
from mmrl.utils.messages import did_you_mean
from mmrl_datasets import image_ref, save_png, video_ref

if TYPE_CHECKING:
    from PIL.Image import Image

MediaInput: TypeAlias = "str | Path | Image"
"""An image or video file, or a PIL image."""

_VIDEO_SUFFIXES: Final = (".mp4", ".mkv", ".webm", ".mov", ".avi", ".m4v", ".mpg", ".mpeg")
_PLACES: Final = (AnswerType.BOX, AnswerType.BOXES, AnswerType.POINT, AnswerType.POINTS)


@dataclass(frozen=True, slots=True)
class Generation:
    """A response to one question."""

    response: Response  # the text, the parsed answer, and the reason why it ended
    answer_type: AnswerType  # decides how the answer was parsed

    @property
    def text(self) -> str:
        """Everything that the model wrote."""
        return self.response.text

    @property
    def boxes(self) -> list[tuple[float, ...]]:
        """Boxes (four numbers) or points (two) of the answer, in pixels of the first image.

        Empty unless the question has an `answer_type` of boxes or points, and the answer could be parsed.
        """
        value = self.response.answer.value
        if not (self.answer_type in _PLACES and value and self.response.resize_maps):
            return []
        # One box or point is a tuple of numbers; several are `Region`s.
        places = [place.coordinates for place in value] if isinstance(value[0], Region) else [value]
        resize, source = self.response.resize_maps[0], self.response.coordinate_system
        return [resize.convert(place, source, CoordinateSystem.PX_ORIGINAL) for place in places]


class Policy:
    """A model on its device that answers questions. As a context manager it closes itself."""

    def __init__(self, answer: Callable[[Sample], Response], media_dir: Path, stack: ExitStack) -> None:
        """Use `Policy.from_run`."""
        self._answer, self._media_dir, self._stack = answer, media_dir, stack
        self._num_questions = 0
        self._is_closed = False

    @classmethod
    def from_run(cls, run: str | Path, *, checkpoint: str | None = None, overrides: Sequence[str] = ()) -> Policy:
        """Load a run directory, one of its checkpoints, or a folder of transformers.

        Prompts, image sizes, response format and rollout steps come from the run. `checkpoint` is the name of a
        checkpoint, or "best"; the newest by default. `overrides` are settings such as "evaluation.temperature=1".

        Raises:
            UserError: there is no such model, or a setting is invalid.
        """
        check_overrides(overrides)
        from mmrl.evaluation.answering import open_model

        with ExitStack() as stack:
            folder = Path(stack.enter_context(TemporaryDirectory(prefix="mmrl-policy-")))
            answer = stack.enter_context(open_model(str(run), checkpoint, overrides, folder))
            return cls(answer, folder, stack.pop_all())

    def generate(
        self, images: MediaInput | Sequence[MediaInput], question: str, *, answer_type: str = "text"
    ) -> Generation:
        """Answer one question about images or videos, which come before its text.

        `answer_type` ("text", "number", "choice", "box" and so on, see `AnswerType`) decides how the answer is parsed,
        and what the format instruction asks for if training added one.

        Raises:
            UserError: a medium or `answer_type` cannot be used, the prompt is too long, or the policy is closed.
        """
        if self._is_closed:
            raise UserError("this policy is closed; load it again with Policy.from_run")
        if answer_type not in list(AnswerType):
            hint = did_you_mean(str(answer_type), list(AnswerType)) or f"use {', '.join(AnswerType)}"
            raise UserError(f"answer_type {answer_type!r} is unknown; {hint}")
        if not isinstance(question, str):
            raise UserError(f"a question is text, not {question!r:.80}")
        given = [images] if isinstance(images, str | Path | bytes) or not isinstance(images, Sequence) else images
        media = [self._reference(medium) for medium in given]
        kind = AnswerType(answer_type)
        # Random numbers derive from the id. Each call has a new id, so a repeated question is sampled anew.
        sample = Sample(
            id=f"question-{self._num_questions}",
            task="question",
            parts=(*media, question),
            target=Target(answer_type=kind, value=None),
        )
        self._num_questions += 1
        return Generation(self._answer(sample), kind)

    def close(self) -> None:
        """Free the engine, and delete the copies of PIL images."""
        self._is_closed = True
        self._stack.close()

    def __enter__(self) -> Policy:
        """Return the policy."""
        return self

    def __exit__(self, *_: object) -> None:
        """Close it."""
        self.close()

    def _reference(self, medium: MediaInput) -> MediaRef:
        if isinstance(medium, str | Path):
            path = Path(medium).absolute()
            return video_ref(path) if path.suffix.lower() in _VIDEO_SUFFIXES else image_ref(path)
        from PIL import Image, ImageOps

        if not isinstance(medium, Image.Image):
            raise UserError(f"images are paths or PIL images, not {type(medium).__name__}; see PIL.Image.open")
        try:
            # Upright, like a picture that is given as a file.
            return save_png(ImageOps.exif_transpose(medium), self._media_dir, "image")
        except (OSError, ValueError) as error:
            hint = "open it again, or try image.convert('RGB')"
            raise UserError(f"the PIL image cannot be used: {error}; {hint}") from error
