"""The record of a run's data. A resumed run compares its rows and media with it to notice changed data."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Final

from mmrl.config.schema import DataConfig
from mmrl.data.rows import SplitRows
from mmrl.log.console import Console
from mmrl.types import ImageRef, Sample, Target, UserError
from mmrl.utils.files import write_atomically
from mmrl.utils.messages import first_lines

_BENCHMARKS: Final = "benchmarks"
_PLAIN_TYPES: Final = (str, int, float, Target, ImageRef)

SplitDigests = dict[str, dict[str, str]]
"""Sample id → name of a field → digest of its value; the samples are in the order of their sources."""


@dataclass(slots=True, kw_only=True)
class DataRecord:
    """A file with a digest for every field of every sample that the run began with.

    Media are identified by their content, so data may move to another folder. Of a streamed source, only the rows that
    are checked at the start are recorded.
    """

    path: Path  # the file; it does not exist before the run has begun
    data: DataConfig  # names the sources, and says whether changed data end the run
    console: Console  # receives the differences where the run continues with them
    differences: list[str] = field(default_factory=list)  # a sentence for each, found by the checks
    # Digests of the data as they are now, by split and sample, as JSON text: a quarter of the memory of a dictionary.
    _digests: dict[str, dict[str, str]] = field(default_factory=dict)

    def check(self, splits: Mapping[str, SplitRows]) -> None:
        """Compare the data, by split, with the data that the run began with.

        Raises:
            UserError: they differ, and `data.on_changed_data` is `stop`.
        """
        for name, split in splits.items():
            digests = self._digests[name] = {}
            for row in split.samples:
                digests[row.id] = json.dumps(digest_sample(row, split.source_indices[row.id]))
        known = self._read()
        if known is None:
            return
        found: list[str] = []
        for name, split in splits.items():
            found += self._compare_split(name, split, known.get(name, {}))
        self._report(found)

    def check_benchmarks(self, benchmarks: Mapping[str, str]) -> None:
        """Compare the digests of the questions and media of benchmarks, by name; raises as `check`."""
        current = {name: {"questions": digest} for name, digest in benchmarks.items()}
        self._digests[_BENCHMARKS] = {name: json.dumps(digests) for name, digests in current.items()}
        known = (self._read() or {}).get(_BENCHMARKS, {})
        # A benchmark may join a run at any time.
        changed = [name for name, digests in current.items() if known.get(name, digests) != digests]
        self._report([f"evaluation.benchmarks: questions or media of {name} changed" for name in changed])

    def save(self) -> None:
        """Write the digests of the data as they are now, and drop them; raises UserError if this is impossible."""
        splits = []
        for name, digests in self._digests.items():
            samples = [f"{json.dumps(sample_id)}: {text}" for sample_id, text in digests.items()]
            splits.append(f"{json.dumps(name)}: {{{', '.join(samples)}}}")
        self._digests.clear()
        write_atomically(self.path, f"{{{', '.join(splits)}}}")

    def _read(self) -> dict[str, SplitDigests] | None:
        """Return the digests that the run began with; None for a new run."""
        if not self.path.exists():
            return None
        try:
            known: dict[str, SplitDigests] = json.loads(self.path.read_text())
        except (OSError, ValueError) as error:
            raise UserError(
                f"{self.path} cannot be read ({error}), so nothing shows whether the data have changed since this run "
                "began; restore the file, or delete it to continue with the data as they are"
            ) from error
        return known

    def _report(self, found: Sequence[str]) -> None:
        """Keep the differences and warn of them, or raise a UserError where they end the run."""
        if not found:
            return
        self.differences += found
        count = f"{len(found)} difference{'' if len(found) == 1 else 's'}"
        lines = [f"the data have changed since this run began ({count}):"]
        lines += first_lines(found)
        if self.data.on_changed_data == "warn":
            self.console.warn("\n".join(lines))
            return
        lines.append(
            "restore them, begin a run in another directory with run.dir=..., or continue with the data as they are, "
            "which the manifest then records: data.on_changed_data=warn"
        )
        raise UserError("\n".join(lines))

    def _compare_split(self, name: str, split: SplitRows, known: SplitDigests) -> Iterator[str]:
        """Yield a sentence for each difference of a split from its known digests."""
        current, samples = self._digests[name], {sample.id: sample for sample in split.samples}
        rejected = dict(split.rejected)
        for sample_id, digests in known.items():
            place = f"{self._name_source(name, digests['source'])}: sample {sample_id}"
            if current.get(sample_id) == json.dumps(digests):
                continue
            if sample_id in current:
                fields = _describe_fields(samples[sample_id], digests, json.loads(current[sample_id]))
                yield f"{place}: {fields} changed"
            elif sample_id in rejected:
                yield f"{place} can no longer be used: {rejected[sample_id]}"
            else:
                # A row that cannot be read may have lost its id.
                unusable = [f"; rows that cannot be used: {row.id}: {row.reason}" for row in split.rejected]
                yield f"{place} is gone" + "".join(unusable[:1])
        for sample_id, text in current.items():
            if sample_id not in known:
                yield f"{self._name_source(name, json.loads(text)['source'])}: sample {sample_id} is new"
        if known.keys() == current.keys() and list(known) != list(current):
            first = next(now for before, now in zip(known, current, strict=True) if before != now)
            yield f"data.{name}: the samples come in another order, from {first} on"

    def _name_source(self, split: str, index: str) -> str:
        source = self.data.sources_by_split()[split][int(index)]
        return f"data.{split}.{index} ({source.fn})"


def digest_sample(sample: Sample, source_index: int) -> dict[str, str]:
    """Return a digest for each field of a sample that has a value, and the index of its source."""
    values: dict[str, object] = {
        "task": sample.task,
        # An empty text holds the place of a medium.
        "question": [part if isinstance(part, str) else "" for part in sample.parts],
        "target": sample.target,
        "label": sample.label,
        "thinking": sample.thinking,
        "response": sample.response,
        "meta": sample.meta,
    }
    for index, ref in enumerate(sample.media):
        values[f"media {index}"] = replace(ref, path="")
    digests = {"source": str(source_index)}
    for name, value in values.items():
        if value is not None and value != {}:
            text = _stable_text(value).encode("utf-8", errors="surrogatepass")
            digests[name] = hashlib.blake2b(text, digest_size=8).hexdigest()
    return digests


def _stable_text(value: object) -> str:
    """Return a text that is the same in every process: without memory addresses, and with sets in order."""
    if isinstance(value, _PLAIN_TYPES):  # most values; tested first, as a test for Mapping takes longer
        return _strip_addresses(repr(value))
    if isinstance(value, Mapping):
        entries = [f"{key!r}: {_stable_text(inner)}" for key, inner in value.items()]
        return ", ".join(sorted(entries))
    if isinstance(value, set | frozenset):
        return ", ".join(sorted(map(repr, value)))
    if isinstance(value, list | tuple):
        return f"[{', '.join(map(_stable_text, value))}]"
    return _strip_addresses(repr(value))


def _strip_addresses(text: str) -> str:
    return re.sub(r" at 0x[0-9a-f]+", "", text) if " at 0x" in text else text


def _describe_fields(sample: Sample, before: Mapping[str, str], now: Mapping[str, str]) -> str:
    """Return the names of the fields that differ, media with their path."""
    paths = {f"media {index}": f" ({ref.path})" for index, ref in enumerate(sample.media)}
    return ", ".join(name + paths.get(name, "") for name in {**before, **now} if before.get(name) != now.get(name))
