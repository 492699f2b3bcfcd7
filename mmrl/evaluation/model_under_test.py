"""Who is examined: a folder of transformers, a run of mmrl, or one of its checkpoints; and the settings it brings."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from mmrl import checkpoint
from mmrl.checkpoint.hf_export import SETTINGS, restored
from mmrl.config import Config, Exam, load
from mmrl.evaluation.graders import RIGHT
from mmrl.log.run_dir import RunDir
from mmrl.media.cache import MediaStore
from mmrl.policy.build import device_of, encoder_of, model_of
from mmrl.policy.lora import Adapter
from mmrl.policy.pretrained import load_reader
from mmrl.policy.processor import QwenProcessor
from mmrl.policy.qwen_vl import Policy, banned_ids
from mmrl.rollout.factory import prompt_limit
from mmrl.types import Access, UserError
from mmrl.utils.torch_threads import use_threads

_WEIGHTS: Final = ("*.safetensors", "*.bin", "config.json", "preprocessor_config.json", "chat_template*", "tokenizer*")
_PICTURE_BYTES: Final = 256 * 2**20
_BORROWED: Final = ("model", "answer", "rollout", "evaluation")


@dataclass(frozen=True, slots=True, kw_only=True)
class Candidate:
    """Where a model is. `config` is that of the run it is from, if known; `run` and `saved` its checkpoint where it is
    one.
    """

    name: str
    path: Path
    config: Config | None = None
    run: RunDir | None = None
    saved: Path | None = None

    def settings(self, *, by_rule: bool) -> dict[str, Any]:
        """What it brings to an exam, which a benchmark's rules or its own run's rewards judge: that run's settings."""
        if self.config is None:
            return {"model": {"path": str(self.path)}}
        given = brought(self.config, by_rule=by_rule)
        if self.saved is None:  # an export has everything inside
            given["model"] |= {"path": str(self.path), "scratch": None, "lora": None}
        return given

    def revision(self) -> str:
        """A hash over the files of the model, with those of the model that a checkpoint builds on."""
        folders = [self.path] if self.saved is None else [self.saved]
        base = self.config.model.path if self.saved and self.config else None
        folders += [Path(base)] if base and Path(base).is_dir() else []
        digest = hashlib.sha256((base or "").encode() if base and not Path(base).is_dir() else b"")
        for file in (file for folder in folders for file in _files(folder)):
            with file.open("rb") as content:
                digest.update(file.name.encode() + hashlib.file_digest(content, "sha256").digest())
        return digest.hexdigest()


def brought(config: Config, *, by_rule: bool) -> dict[str, Any]:
    """What of a run's settings an exam has too, as a mapping. Where rules judge, `right` stands for the run's rewards:
    steps of its program that go by those go by the benchmark's verdict.
    """
    plain = config.model_dump(mode="json")
    given = {name: plain[name] for name in _BORROWED}
    del given["evaluation"]["benchmarks"]
    for step in given["evaluation"]["program"] if by_rule else ():
        if "correct" in step:
            step["correct"] = [RIGHT]
    run = {name: plain["run"][name] for name in ("seed", "threads")}
    return {**given, "run": run, "limits": plain["data"]["limits"]}


def find(model: str, name: str | None, warn: Callable[[str], None]) -> Candidate:
    """The model that is meant; of a run the checkpoint `name`, `best`, or the newest.

    Raises:
        UserError: there is none.
    """
    path = Path(model)
    if path.parent.name == "checkpoints" and (path.parent.parent / "config.yaml").is_file():
        path, name = path.parent.parent, path.name
    run = RunDir(path)
    if run.config.is_file():
        saved = checkpoint.find(run.checkpoints, name, load(run.config).config.checkpoints.best, warn)
        return Candidate(name=model, path=path, config=load(saved / checkpoint.CONFIG).config, run=run, saved=saved)
    if name is not None:
        raise UserError(f"--checkpoint {name}: {path} is no run directory of mmrl, which alone has checkpoints")
    if (path / "adapter_config.json").is_file() and not (path / "config.json").is_file():
        raise UserError(f"{path} is an adapter alone; name its run, or export it with `mmrl export --merge-lora`")
    if not (path / "config.json").is_file():
        raise UserError(
            f"{path} is neither a folder of transformers (no config.json) nor a run of mmrl (no config.yaml); nothing "
            "is fetched: download a model of the hub first"
        )
    settings = path / SETTINGS
    return Candidate(name=model, path=path, config=load(settings).config if settings.is_file() else None)


@dataclass(frozen=True, slots=True, kw_only=True)
class Examinee:
    """A model at work: what reads for it, its weights, the tokens that it must not draw."""

    processor: QwenProcessor
    policy: Policy
    adapter: Adapter | None
    banned: tuple[int, ...]


def enter(candidate: Candidate, exam: Exam, access: Access) -> Examinee:
    """Load a model, with the pixels and the grammar of the exam.

    Raises:
        UserError: it cannot be loaded.
    """
    use_threads(exam.run.threads)
    adapter = None
    if candidate.run and candidate.saved and candidate.config:
        config = candidate.config.model_copy(update={"model": exam.model})
        loaded, adapter, policy = restored(candidate.run, candidate.saved, config)
        policy.model.to(device_of(exam))
    else:
        loaded = model_of(exam, lambda: load_reader(exam.model))
        policy = Policy(loaded.model.to(device_of(exam)), logits_chunk=exam.model.logits_chunk)
    store = MediaStore(access, exam.limits, max_bytes=_PICTURE_BYTES)
    processor = QwenProcessor(encoder_of(exam, loaded, store, prompt_limit(exam, policy)))
    banned = banned_ids(processor.tokenizer, policy.model.get_input_embeddings().num_embeddings)
    return Examinee(processor=processor, policy=policy, adapter=adapter, banned=banned)


def _files(folder: Path) -> list[Path]:
    return sorted({file for pattern in _WEIGHTS for file in folder.glob(pattern)})


def differences(before: Mapping[str, Any], now: Mapping[str, Any]) -> list[str]:
    """What two sets of settings differ in, as lines."""
    names = dict.fromkeys((*before, *now))
    return [f"{name}: {before.get(name)!r} -> {now.get(name)!r}" for name in names if before.get(name) != now.get(name)]
