"""The search of `mmrl_datasets.environments.pages`, with pages ranked by embeddings of their pictures.

    python -m mmrl.rollout.environments.encoded_pages pages.jsonl ENCODER

writes the index, once for a table and an encoder; `fn: "mmrl.rollout.environments.encoded_pages:make"` searches it.

Source: VRAG-RL, arXiv:2505.22019, and search_engine.py of github.com/Alibaba-NLP/VRAG at commit a5bfd20, which takes
the largest inner products of one vector for a page and one for the query. Departure: the encoder is a CLIP or SigLIP,
which reads the beginning of a long query, in place of their GVE or Qwen3-VL-Embedding.
"""

from __future__ import annotations

import io
import sys
from collections.abc import Sequence
from functools import lru_cache
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from pydantic import PositiveInt

from mmrl.media.pixel_reader import PixelReader
from mmrl.types import Environment, MediaPolicy, Unscorable, UserError
from mmrl.utils.digests import file_digest, frames_digest
from mmrl.utils.files import write_atomically
from mmrl_datasets.environments.pages import Page, PageSearch, read_pages
from mmrl_datasets.readers.columns import parse_column
from mmrl_rewards.services.encoder import embed_caption, embed_captioned_image


def make(*, corpus: str, encoder: str, top_k: PositiveInt = 10, relevant: str = "pages") -> Environment:
    """Make the search of one episode; raises UserError if the table cannot be read, or has no index for the encoder.

    Options:
        corpus, top_k, relevant: as in `mmrl_datasets.environments.pages:make`; pages need no text.
        encoder: folder with a CLIP, SigLIP or similar model as transformers saves it; nothing is downloaded. Each
            process loads it in its first search, within the step's `timeout_s`.
    """
    pages, vectors = _load(Path(corpus).absolute(), encoder)

    def rank(words: str) -> Sequence[int]:
        similarities = vectors @ embed_caption(encoder, words, cut=True)
        best_first: list[int] = np.argsort(-similarities, kind="stable").tolist()
        return best_first

    return PageSearch(pages, rank, top_k, parse_column(relevant, "relevant"))


def index_file(table: Path, encoder: str) -> Path:
    """Return the path of the index: beside the table, named by a digest of table and encoder, which it must read."""
    try:
        files = [path for path in sorted(Path(encoder).iterdir()) if path.suffix in (".json", ".safetensors")]
        digest = frames_digest({path.name: file_digest(path) for path in [*files, table]})
    except OSError as error:
        raise UserError(f"{error.filename}: cannot be read: {error.strerror}") from error
    return table.with_name(f"{table.stem}.{digest[:16]}.npy")


def write_index(table: Path, encoder: str) -> Path:
    """Write the index of a table, float64 unit vectors `[pages, embedding_size]` of its pictures; return its path.

    Raises UserError if a file cannot be read or written, and Unscorable if there is no model in the folder.
    """
    file, content = index_file(table, encoder), io.BytesIO()
    reader = PixelReader(MediaPolicy(roots=(table.parent.resolve(),)))
    pictures = (reader.read_image(page.ref(), None) for page in read_pages(table))
    np.save(content, np.stack([embed_captioned_image(encoder, picture) for picture in pictures]))
    write_atomically(file, content.getvalue())
    return file


@lru_cache(maxsize=4)  # an environment is made for each episode
def _load(table: Path, encoder: str) -> tuple[Sequence[Page], NDArray[np.float64]]:
    file = index_file(table, encoder)
    if not file.exists():
        command = f"python -m mmrl.rollout.environments.encoded_pages {table} {encoder}"
        raise UserError(f"there is no index of these pages and this encoder; `{command}` writes {file.name}")
    return read_pages(table), np.load(file)


if __name__ == "__main__":
    try:
        print(write_index(Path(sys.argv[1]).absolute(), sys.argv[2]))
    except (UserError, Unscorable) as error:
        sys.exit(f"error: {error}")
