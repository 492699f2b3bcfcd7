"""The folder of an evaluation, which survives kills, and the settings that identify it. Imports without torch.

The folder holds:

settings.json        everything that decides the responses; another evaluation in the same folder is refused
predictions.jsonl    responses, appended batch by batch
verdicts.jsonl, report.json, report.md      made from the predictions alone, so that they can be made again
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from mmrl.config import EvalConfig, flatten_settings
from mmrl.types import UserError
from mmrl.utils.files import report_write_errors, temporary_path, write_atomically

if TYPE_CHECKING:
    from mmrl.benchmarks.readers.questions import BenchmarkQuestions

RESCORE: Final = "--rescore (Python: rescore=True)"
"""Option that grades predictions again, as messages name it."""


class EvalDir:
    """The folder of an evaluation."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.settings_file = path / "settings.json"
        self.predictions_file = path / "predictions.jsonl"

    def claim(self, settings: Mapping[str, Any]) -> dict[str, Any] | None:
        """Claim the folder for this evaluation; return settings.json of an earlier start, or None at the first start.

        Raises:
            UserError: the folder holds another evaluation, or something else.
        """
        with report_write_errors(self.path):
            self.path.mkdir(parents=True, exist_ok=True)
        return self.check(settings)

    def check(self, settings: Mapping[str, Any], *, later: Collection[str] = ()) -> dict[str, Any] | None:
        """Return what `claim` returns; write nothing. Settings in `later` are not known yet, so they are not compared.

        Raises:
            UserError: as `claim`.
        """
        if not self.settings_file.exists():
            # What a start that failed may have left behind.
            ours = {"data", "log.txt", temporary_path(self.settings_file).name}
            foreign = sorted({entry.name for entry in self.path.iterdir()} - ours) if self.path.is_dir() else []
            if foreign:
                raise UserError(f"{self.path} holds {foreign[0]!r} but is not an evaluation; choose another folder")
            return None
        try:
            before: dict[str, Any] = json.loads(self.settings_file.read_text(encoding="utf-8"))
            earlier_settings = before["settings"]
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise UserError(f"{self.settings_file}: cannot be read ({error}); choose another folder") from error
        # Through JSON once, as the earlier settings have been: tuples become lists, enums text.
        now = json.loads(json.dumps(settings))
        changed = []
        for name in dict.fromkeys((*earlier_settings, *now)):
            if name not in later and earlier_settings.get(name) != now.get(name):
                changed.append(f"  {name}: {earlier_settings.get(name)!r} -> {now.get(name)!r}")
        if changed:
            lines = "\n".join(changed)
            raise UserError(
                f"{self.path} holds another evaluation; these differ (there -> here):\n{lines}\n"
                "set them back, or choose another folder"
            )
        return before

    def claim_or_reset(self, settings: Mapping[str, Any], missing: Mapping[str, str]) -> None:
        """Claim a folder of a training run; if it holds the evaluation of other weights, empty it first.

        Raises:
            UserError: the folder cannot be written.
        """
        try:
            before = self.claim(settings)
        except UserError:
            # A training run that resumes from an earlier checkpoint reaches the same step with other weights.
            shutil.rmtree(self.path, ignore_errors=True)
            before = self.claim(settings)
        if before is None:
            self.write_settings(settings, missing)

    def read_report(self) -> Mapping[str, Any]:
        """Return report.json of a finished evaluation.

        Raises:
            UserError: the file cannot be read.
        """
        file = self.path / "report.json"
        try:
            report: dict[str, Any] = json.loads(file.read_text(encoding="utf-8"))
        except (OSError, ValueError) as error:
            raise UserError(f"{file}: cannot be read ({error}); {RESCORE} writes it again") from error
        return report

    def write_settings(self, settings: Mapping[str, Any], missing: Mapping[str, str]) -> None:
        """Write the settings that identify the evaluation, and why items cannot be asked, by their ids."""
        text = json.dumps({"settings": settings, "missing": missing}, indent=1, ensure_ascii=False)
        write_atomically(self.settings_file, text + "\n")


def identifying_settings(eval_config: EvalConfig) -> dict[str, Any]:
    """Return the settings that decide the responses, by dotted path."""
    # The model's path and the judge change no response.
    return flatten_settings(eval_config.model_dump(mode="json", exclude={"model": {"path"}, "judge": True}))


def evaluation_identity(
    benchmark: str, revision: str, questions: BenchmarkQuestions, eval_config: EvalConfig
) -> dict[str, Any]:
    """Return everything that decides the responses. A folder keeps it, so that it never mixes two evaluations."""
    files = {"benchmark": benchmark, "model": revision, "data": questions.digest()}
    return {**files, **identifying_settings(eval_config)}
