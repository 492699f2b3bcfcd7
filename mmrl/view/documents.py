"""All documents of a page: the index of its runs, and what the index names."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from datetime import UTC, datetime
from typing import Any

from mmrl.view.run_documents import RunDocuments


def build_index(runs: Sequence[RunDocuments], *, live: bool) -> dict[str, Any]:
    """Return the document `index`, from which the page begins."""
    made = datetime.now(UTC).isoformat(timespec="seconds")
    return {"schema": 1, "made": made, "live": live, "runs": [run.build_entry() for run in runs]}


def build_document(runs: Sequence[RunDocuments], key: str) -> dict[str, Any] | None:
    """Return a document of a live page by its key; None if there is no such document."""
    if key == "index":
        return build_index(runs, live=True)
    for run in runs:
        if key.startswith(f"{run.folder.id}/"):
            return run.build(key)
    return None


def build_all_documents(runs: Sequence[RunDocuments]) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield key and content of every document of an exported page, one at a time, the index last."""
    for run in runs:
        yield from run.build_all()
    # Last, since it counts what the others hold, and lists what could not be read.
    yield "index", build_index(runs, live=False)
