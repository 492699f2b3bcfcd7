"""Read frames of a video file by decord, where it is known to return the requested frames.

decord finds a frame by counting: it seeks to the key frame before it and decodes as many frames as lie between them. It
numbers key frames in the order of storage, which in an open GOP is not the order of display, and also counts frames
that an edit list hides (dmlc/decord, `VideoReader::IndexKeyframes`). From AVI files it returned different frames from
one reading to the next (dmlc/decord, issues 195 and 252). Where a frame does not decode, it repeats a neighbour;
`check_frames_agree` detects that.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from types import ModuleType
from typing import Any

from mmrl.media.video_reader import FramePixels, VideoFileReader
from mmrl.types import MediaError, Size, UserError

REMEDY = "use media.video_reader: pyav"


def load_decord() -> ModuleType:
    """Return the module decord, which prints nothing from here on.

    Raises:
        UserError: it is not installed, or not for this machine.
    """
    try:
        import decord
    except (ImportError, OSError, RuntimeError) as error:
        raise UserError(
            f'media.video_reader: decord cannot be loaded ({error}); pip install "mmrl[decord]", or {REMEDY}'
        ) from error
    decord.logging.set_level(decord.logging.QUIET)
    module: ModuleType = decord
    return module


class DecordFileReader:
    """Reads frames of a video by decord, with the interface of `VideoFileReader`, which has checked the file."""

    def __init__(self, path: str, checked: VideoFileReader) -> None:
        """Copy path, timeline and frame size from the reader by which PyAV checked the file.

        Raises:
            MediaError: decord would give other frames than those asked for.
        """
        if checked.counting_problem:
            raise MediaError(f"{path}: decord would give wrong frames: {checked.counting_problem}; {REMEDY}")
        self._path, self._file = path, checked.file
        self.timeline, self.size = checked.timeline, checked.size

    def read_frames(self, indices: Sequence[int]) -> Iterator[FramePixels]:
        """Yield the frames of these ascending indices: uint8 [height, width, 3], RGB, upright.

        Raises:
            MediaError: decord cannot decode one of them, or counts or sizes frames differently than PyAV.
        """
        decord = load_decord()
        try:
            # With one thread, decord returns the same frames each time. `fault_tol` is the share of frames that may be
            # missing; below one frame, decord raises an error instead of repeating a neighbour of a missing one.
            reader: Any = decord.VideoReader(self._file, num_threads=1, fault_tol=1e-9)
            count = len(self.timeline.timestamps)
            if len(reader) != count:
                raise MediaError(f"{self._path}: decord counts {len(reader)} frames of {count}; {REMEDY}")
            for index in indices:
                frame: FramePixels = reader.get_batch([index]).asnumpy()[0]
                size = Size(frame.shape[1], frame.shape[0])
                if size != self.size:
                    expected = f"{self.size.width}x{self.size.height}"
                    raise MediaError(
                        f"{self._path}: decord gives frames of {size.width}x{size.height}, not {expected}; {REMEDY}"
                    )
                yield frame
        except (decord.DECORDError, decord.DECORDLimitReachedError) as error:
            reason = str(error).splitlines()[0].rpartition("] ")[2]
            raise MediaError(f"{self._path}: decord cannot decode it ({reason}); {REMEDY}") from error
