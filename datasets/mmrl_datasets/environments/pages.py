"""Search in a corpus of page pictures: each search shows one page that the episode has not seen, or a part of a page.

The question is a sample's own. A turn holds one action, in VRAG-RL's grammar, beside whatever thinking:

    <search>words</search>            the best page for these words that was not shown yet
    <bbox>[x1, y1, x2, y2]</bbox>     that part of the picture shown last, cut from its file, in the model's coordinates
    <answer>..</answer>               ends the episode

The corpus is a table, one page in each row: `id`, `path` (relative to the table), the `text` that is searched,
and perhaps `sha256` of the file, which is computed otherwise when the page is first shown. `info` of a search has
`relevant`, 1 if the page is among those of the sample's row, for `mmrl_rewards.environment:retrieval`. `info`
of an answer has `searched`, 1 if there was a search before it, for `mmrl_rewards.environment:success`.

Source: VRAG-RL, arXiv:2505.22019, 3.1 and 3.2. Departures: pages are found by BM25 over text instead of an encoder of
pictures, as in `mmrl.rollout.environments.encoded_pages`; parts of a part are cut from the file, too.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from typing import Final, TypeAlias

from pydantic import PositiveInt

from mmrl.types import (
    LAST_MEDIUM,
    Environment,
    ImageCrop,
    ImageRef,
    Observation,
    Sample,
    StepResult,
    Unscorable,
    UserError,
)
from mmrl.utils.digests import file_digest
from mmrl_datasets.formats.row import BadRowError, get_cell
from mmrl_datasets.formats.tables import open_rows
from mmrl_datasets.readers.columns import Column, optional_value, parse_column

_ACTION: Final = re.compile(r"<(search|bbox|answer)>(.*?)</\1>", re.DOTALL | re.IGNORECASE)
_NUMBER: Final = r"\s*(-?[0-9]{1,6}(?:\.[0-9]{1,9})?)\s*"
_BOX: Final = re.compile(rf"\s*\[{_NUMBER},{_NUMBER},{_NUMBER},{_NUMBER}\]\s*")
_THOUGHT: Final = re.compile(r"<think>.*?</think>", re.DOTALL)
_WORD: Final = re.compile(r"\w+")
_HELP: Final = (
    "One action a turn: <search>words</search>, <bbox>[x1, y1, x2, y2]</bbox> of the picture shown last, or "
    "<answer>..</answer>."
)

Rank: TypeAlias = Callable[[str], Sequence[int]]
"""Returns the places of the pages that fit a query, the best first; equal ones in the order of the table."""


@dataclass
class Page:
    """A page of the corpus."""

    id: str
    file: Path
    text: str
    sha256: str = ""  # of the file, once it is known

    def ref(self) -> ImageRef:
        """Return a reference to the page's picture."""
        self.sha256 = self.sha256 or file_digest(self.file)
        return ImageRef(path=str(self.file), sha256=self.sha256)


@dataclass
class PageSearch(Environment):
    """One episode of searching. It records the pages that were shown."""

    pages: Sequence[Page]
    rank: Rank
    top_k: int  # best pages that a search considers
    relevant: Column  # names a sample's relevant pages
    seen: list[str] = field(default_factory=list)
    searched: bool = False

    def reset(self, sample: Sample, seed: int) -> Observation:
        """Begin with no page shown. The observation is empty, since the question is the sample's own."""
        try:
            gold = optional_value(sample.meta, self.relevant) or ()
        except BadRowError as error:
            raise Unscorable(str(error)) from error
        # A template writes one id per line.
        gold = [line for line in gold.split("\n") if line] if isinstance(gold, str) else gold
        if not isinstance(gold, list | tuple) or not set(map(str, gold)) <= {page.id for page in self.pages}:
            raise Unscorable(f"relevant pages must be a list of ids of pages of the corpus, not {gold!r:.80}")
        self.gold = set(map(str, gold))
        question = sample.meta.get("query")
        self.queries = list(sample.meta.get("queries", [question] if question else []))
        self.answer = str(sample.target.value)
        return self._show()

    def step(self, action: str) -> StepResult:
        """Search, look closer, or answer."""
        # A thought may speak of actions.
        actions = _ACTION.findall(_THOUGHT.sub("", action))
        if len(actions) != 1:
            return StepResult(observation=self._show(text=_HELP), valid=False)
        kind, content = actions[0][0].lower(), actions[0][1]
        if kind == "answer":
            return StepResult(terminated=True, info={"searched": float(self.searched)})
        if kind == "search":
            return self._search(content)
        box = _BOX.fullmatch(content)
        if box is None:
            return StepResult(observation=self._show(text="A box is four numbers: [x1, y1, x2, y2]."), valid=False)
        x1, y1, x2, y2 = map(float, box.groups())
        return StepResult(observation=self._show(ImageCrop(medium_number=LAST_MEDIUM, box=(x1, y1, x2, y2))))

    def expert(self) -> str:
        """Return the next action: a search for each of the row's `queries`, or for its `query`, then the target."""
        return f"<search>{self.queries.pop(0)}</search>" if self.queries else f"<answer>{self.answer}</answer>"

    def _search(self, words: str) -> StepResult:
        self.searched = True
        for index in self.rank(words)[: self.top_k]:
            page = self.pages[index]
            if page.id not in self.seen:
                self.seen.append(page.id)
                return StepResult(observation=self._show(page.ref()), info={"relevant": float(page.id in self.gold)})
        return StepResult(observation=self._show(text="No further page fits these words."))

    def _show(self, *media: ImageRef | ImageCrop, text: str = "") -> Observation:
        return Observation(text=text, media=media, state=", ".join(self.seen) or "no page")


def make(*, corpus: str, top_k: PositiveInt = 10, relevant: str = "pages") -> Environment:
    """Make the search of one episode; raises UserError if it cannot search.

    Options:
        corpus: the table of pages, absolute or relative to the working directory.
        top_k: pages that a search considers; pages that were already shown are skipped.
        relevant: the column of the sample's row that lists the ids of relevant pages, or a Jinja template over its
            columns that writes one a line.
    """
    return PageSearch(*_load_corpus(Path(corpus).absolute()), top_k, parse_column(relevant, "relevant"))


@lru_cache(maxsize=4)  # an environment is made for each episode
def _load_corpus(table: Path) -> tuple[Sequence[Page], Rank]:
    try:
        from rank_bm25 import BM25Okapi
    except ImportError as error:
        raise UserError("the package rank-bm25 is missing; pip install 'mmrl[search]'") from error
    pages = read_pages(table)
    texts = [_split(page.text) for page in pages]
    if not any(texts):
        raise UserError(f"corpus={str(table)!r}: no page has a text")
    index = BM25Okapi(texts)

    def rank(words: str) -> Sequence[int]:
        query = _split(words)
        scores = index.get_scores(query)
        # BM25's scores may be negative for words that most pages have, so shared words are checked separately.
        sharing = [page for page, counts in enumerate(index.doc_freqs) if any(word in counts for word in query)]
        return sorted(sharing, key=lambda page: -scores[page])

    return pages, rank


def read_pages(table: Path) -> list[Page]:
    """Read a table of pages; raises UserError if it cannot be read, a row names no page, or two have one id."""
    pages: dict[str, Page] = {}
    for row in open_rows(table.parent, table.name, "train"):
        try:
            if isinstance(row.cells, BadRowError):
                raise row.cells
            file, name = table.parent / str(get_cell(row.cells, "path")), str(get_cell(row.cells, "id"))
        except BadRowError as error:
            raise UserError(f"{row.location}: a page needs id and path: {error}") from error
        if name in pages:
            raise UserError(f"{row.location}: two pages have the id {name!r}")
        pages[name] = Page(name, file, str(row.cells.get("text", "")), str(row.cells.get("sha256", "")))
    return list(pages.values())


def _split(text: str) -> list[str]:
    return _WORD.findall(text.casefold())
