"""Renders sources as images, uint8 `[height, width, 3]`: SVG and formulas by mmrl, others by a configured renderer.

A source that cannot be drawn raises `DrawingError`, and scores low. A renderer that fails raises `Unscorable`.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
from contextlib import suppress
from functools import lru_cache, partial
from io import BytesIO
from pathlib import Path
from typing import Annotated, Literal

import numpy as np
from PIL import Image, UnidentifiedImageError
from pydantic import BaseModel, ConfigDict, Field, model_validator

from mmrl.types import Unscorable
from mmrl.utils.worker_limits import STARTUP_TIMEOUT_S, WorkerLimits
from mmrl.utils.worker_pool import WorkerDiedError, WorkerPool, WorkerStartError, WorkerTimeoutError
from mmrl_rewards.pixels import Pixels
from mmrl_rewards.services.drawing import DrawingRequest, load_drawing
from mmrl_rewards.services.endpoint import Endpoint, RequestRejected, Seconds, find_kept_reply, keep_reply

_MAX_PIXELS = 16_000_000
_MEGABYTE = 2**20
_WALL_S_PER_CPU_S = 20  # a drawing that has not used its processor time by then is waiting for a busy machine
_LIMITED_EXEC_SCRIPT = """
import os, sys
from resource import RLIMIT_CORE, RLIMIT_CPU, RLIMIT_FSIZE, setrlimit
cpu_s, max_bytes = map(int, sys.argv[1:3])
for limit, most in ((RLIMIT_CPU, cpu_s), (RLIMIT_FSIZE, max_bytes), (RLIMIT_CORE, 0)):
    setrlimit(limit, (most, most))
os.execv(sys.argv[3], sys.argv[3:])
"""


class DrawingError(Exception):
    """The source cannot be drawn, or takes more than the limits allow."""


class DrawingLimits(BaseModel):
    """Limits for drawing one source."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    cpu_s: Annotated[int, Field(ge=1, le=600)] = 2  # seconds of processor time
    memory_mb: Annotated[int, Field(ge=256)] = 1024  # megabytes of memory
    max_bytes: Annotated[int, Field(ge=1)] = 8_000_000  # size of the image as a PNG, in bytes
    max_chars: Annotated[int, Field(ge=1)] = 100_000  # length of the source, in characters


def draw(language: Literal["svg", "latex"], source: str, *, side: int, limits: DrawingLimits) -> Pixels:
    """Draw an SVG, fitted into `side` x `side` pixels, or a formula in its natural size, on white.

    Each drawing has its own process, forked from one that has loaded the libraries and is started once for each
    process that calls this.

    Raises:
        DrawingError: the source cannot be drawn, or goes beyond the limits.
        Unscorable: the machine is too busy, or no process can be started.
    """
    if len(source) > limits.max_chars:
        raise DrawingError(f"{len(source)} characters, at most {limits.max_chars} are drawn")
    request = DrawingRequest(language, source, side)
    try:
        png = _get_drawing_pool(os.getpid(), limits).submit(request, limits.cpu_s * _WALL_S_PER_CPU_S).result()
    except WorkerTimeoutError as error:
        raise Unscorable("the machine is too busy to draw") from error
    except WorkerDiedError as error:
        if error.exit_code == -signal.SIGXCPU:
            raise DrawingError(f"takes more than {limits.cpu_s} s to draw") from error
        raise DrawingError("cannot be drawn") from error
    except WorkerStartError as error:
        raise Unscorable(f"the process that draws {error}; are its libraries installed?") from error
    if len(png) > limits.max_bytes:
        raise DrawingError(f"more than {limits.max_bytes} bytes when drawn")
    return decode_png(png)


class ExternalRenderer(BaseModel):
    """A renderer of yours: a command, or an address.

    An address is sent {"language": .., "source": ..}. It answers with a PNG, or with status 422 if the source cannot be
    drawn.

    A command reads the file {input} and writes the PNG {output}, in its own folder, which is then deleted. Its
    environment holds a search path only, and its time and file sizes are limited. The page or program that it draws
    is not restricted otherwise: the command itself must cut off the network and the files of its user, by a container,
    or by a browser whose proxy leads nowhere as in rewards/README.md.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    language: Literal["html", "latex", "python", "svg", "markdown"]  # language of the sources
    endpoint: Endpoint | None = None  # address of the renderer, in place of a command
    command: tuple[str, ...] = ()  # program and arguments, which contain {input} and {output}
    # Seconds that a command may run. Beyond them the source is at fault, since the target was drawn in less.
    timeout_s: Seconds = 20.0
    cpu_s: Annotated[int, Field(ge=1)] = 20  # seconds of processor time a command may take
    # Size of the image and of every other file that the command writes, in bytes.
    max_bytes: Annotated[int, Field(ge=1)] = 8_000_000
    max_chars: Annotated[int, Field(ge=1)] = 100_000  # length of the source, in characters
    cache: str | None = None  # folder that keeps the images which a command drew

    @model_validator(mode="after")
    def _check_one_renderer(self) -> ExternalRenderer:
        if (self.endpoint is None) == (not self.command):
            raise ValueError("give either `endpoint` or `command`")
        command = " ".join(self.command)
        if self.command and not ("{input}" in command and "{output}" in command):
            raise ValueError("the command names neither {input} nor {output}, or only one of them")
        return self

    def draw(self, source: str) -> Pixels:
        """Draw a source.

        Raises:
            DrawingError: the renderer refuses it, fails on it, or takes too long.
            Unscorable: the renderer cannot be reached, or answers with something else.
        """
        if len(source) > self.max_chars:
            raise DrawingError(f"{len(source)} characters, at most {self.max_chars} are drawn")
        try:
            if self.endpoint is not None:
                return self.endpoint.post({"language": self.language, "source": source}, decode_png)
            request = json.dumps([self.language, self.command, source]).encode()
            kept = find_kept_reply(self.cache, request) if self.cache else None
            if kept is not None and kept.exists():
                return decode_png(kept.read_bytes())
            with tempfile.TemporaryDirectory() as folder:
                png = self._run_command(source, Path(folder))
            if kept is not None:
                keep_reply(kept, png)
            return decode_png(png)
        except (RequestRejected, ValueError) as error:
            raise DrawingError(f"comes to nothing: {error}") from error

    def _run_command(self, source: str, folder: Path) -> bytes:
        input_path, output_path = folder / f"source.{self.language}", folder / "picture.png"
        input_path.write_text(source, encoding="utf-8", errors="replace")
        program = shutil.which(self.command[0], path=os.defpath)
        if program is None:
            raise Unscorable(f"there is no program {self.command[0]!r}: give its whole path")
        options = [
            part.replace("{input}", str(input_path)).replace("{output}", str(output_path)) for part in self.command[1:]
        ]
        process = subprocess.Popen(
            [sys.executable, "-c", _LIMITED_EXEC_SCRIPT, str(self.cpu_s), str(self.max_bytes), program, *options],
            cwd=folder,
            env={"PATH": os.defpath, "HOME": str(folder)},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )
        try:
            status = process.wait(self.timeout_s)
        except subprocess.TimeoutExpired:
            raise DrawingError(f"takes more than {self.timeout_s:g} s to draw") from None
        finally:
            # The whole session: the command may have started further processes.
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
        if status != 0 or not output_path.is_file():
            found = "a" if output_path.is_file() else "no"
            raise DrawingError(f"the renderer ends with status {status}, {found} picture")
        return output_path.read_bytes()


def decode_png(png: bytes) -> Pixels:
    """Return the pixels of a PNG on a white page, uint8 `[height, width, 3]`.

    Raises:
        ValueError: the bytes are not PNG, or it has more than 16 million pixels.
    """
    try:
        with Image.open(BytesIO(png), formats=("PNG",)) as image:
            if image.width * image.height > _MAX_PIXELS:
                raise ValueError(f"a picture of {image.width} x {image.height} pixels")
            page = Image.new("RGBA", image.size, "white")
            page.alpha_composite(image.convert("RGBA"))
    except (UnidentifiedImageError, OSError, SyntaxError, Image.DecompressionBombError) as error:
        raise ValueError(f"no PNG: {error}") from error
    return np.asarray(page.convert("RGB"))


@lru_cache(maxsize=8)
def _get_drawing_pool(process_id: int, limits: DrawingLimits) -> WorkerPool[DrawingRequest, bytes]:
    """Return the pool of this process."""
    # `process_id` is only a key of the cache: a fork must not use its parent's pool, whose threads it does not have.
    del process_id
    load = partial(load_drawing, limits.cpu_s, limits.memory_mb * _MEGABYTE)
    return WorkerPool(load, 1, limits=WorkerLimits(STARTUP_TIMEOUT_S), fork_each_call=True)
