"""The composition root: a config becomes objects. Concrete classes meet only here."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from mmrl.algo.seeds import derive
from mmrl.answer import Grammar, Section
from mmrl.config import Config
from mmrl.config.schema import AnswerGrammar, Loss, Origin, Rl, Scratch, Sft, Term
from mmrl.evaluate import Evaluator
from mmrl.learner.engine_torch import TorchEngine
from mmrl.learner.learner import GrpoLearner, LearnPlan
from mmrl.log.console import Console
from mmrl.log.run_dir import RunDir
from mmrl.media.image import MediaError
from mmrl.media.store import MediaStore
from mmrl.options import options_of, settle
from mmrl.plugins import resolve
from mmrl.policy.encoder import Encoder
from mmrl.policy.families import FAMILIES, family_of
from mmrl.policy.pretrained import Loaded, load_pretrained
from mmrl.policy.processor import QwenProcessor
from mmrl.policy.qwen_vl import Policy, banned_ids
from mmrl.policy.scratch import make_model, make_processor, train_tokenizer
from mmrl.rollout.hf import HfSampler
from mmrl.score import BoundTerm, Judge
from mmrl.sft import lesson
from mmrl.types import Access, ImageRef, Place, Reject, Sample, SamplingLaw, UserError
from mmrl_rewards.contract import bind

_PICTURE_BYTES = 256 * 2**20
_LISTED = 5


@dataclass(frozen=True, slots=True, kw_only=True)
class Samples:
    """The samples of a run."""

    train: tuple[Sample, ...]
    validation: tuple[Sample, ...]
    test: tuple[Sample, ...]

    def parts(self) -> dict[str, tuple[Sample, ...]]:
        """The samples by part of the data."""
        return {"train": self.train, "validation": self.validation, "test": self.test}

    def digests(self) -> dict[str, str]:
        """A hash over the samples and pictures of each part, wherever the pictures lie."""
        return {name: _digest(samples) for name, samples in self.parts().items()}


class World:
    """Everything of a run that outlives a stage."""

    def __init__(self, config: Config, base: Path, run_dir: RunDir, console: Console) -> None:
        self.config, self.run_dir, self.console = config, run_dir, console
        torch.set_num_threads(config.run.threads or os.cpu_count() or 1)
        torch.manual_seed(config.run.seed)
        self.grammar = _grammar(config.answer)
        self.judge = Judge([_bound_term(term, base) for term in config.rewards.terms])
        access = _access(config, base, run_dir)
        store = MediaStore(access, config.data.limits, max_bytes=_PICTURE_BYTES)
        place = Place(work=run_dir.data, base=base, seed=config.run.seed, access=access)
        console.say(f"{config.run.name}: reading samples, opening every picture, trying every reward ...")
        self.samples = self._load_samples(place, store)
        self.judge.check(self.samples.train, self.grammar)
        self.judge.check([*self.samples.validation, *self.samples.test], self.grammar, evaluation=True)
        self._check_lessons()
        loaded = self._model()
        self.policy = Policy(loaded.model.to(_device(config)), freeze=config.model.freeze)
        if not self.policy.trainable:
            raise UserError("model.freeze: every part of the model is frozen; leave at least one to train")
        encoder = Encoder(
            loaded.processor,
            loaded.family,
            self.grammar,
            store,
            video=config.model.video,
            instruct=config.answer.instruct,
            max_prompt_tokens=config.model.max_prompt_tokens,
        )
        self.processor = QwenProcessor(encoder)
        if config.model.gradient_checkpointing:
            loaded.model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
        self.eos_id: int = self.processor.tokenizer.eos_token_id
        self.samples = self._askable()
        embeddings = self.policy.model.get_input_embeddings().num_embeddings
        self.banned = banned_ids(self.processor.tokenizer, embeddings)
        console.say(self._introduction())

    def _introduction(self) -> str:
        samples, model = self.samples, self.policy.model
        total = sum(parameter.numel() for parameter in model.parameters())
        trained = sum(parameter.numel() for parameter in self.policy.trainable)
        return (
            f"{len(samples.train):,} training, {len(samples.validation):,} validation and {len(samples.test):,} test "
            f"samples; {type(model).__name__} with {total:,} parameters, {trained:,} of them trained, on {model.device}"
        )

    def evaluator(self) -> Evaluator:
        """Measures the current weights."""
        options = self.config.evaluation
        law = SamplingLaw(temperature=options.temperature, banned=self.banned, max_new_tokens=options.max_new_tokens)
        sampler = HfSampler(self.policy, self.processor, salt=(self.config.run.seed, "evaluation"))
        return Evaluator(
            asker=self.processor, sampler=sampler, judge=self.judge, law=law, batch_size=options.batch_size
        )

    def engine(self, stage: Sft | Rl) -> TorchEngine:
        """A fresh optimizer for a stage."""
        return TorchEngine(self.policy.trainable, stage.optimizer)

    def learner(self, stage: Sft | Rl, engine: TorchEngine, reference: Policy | None) -> GrpoLearner:
        """The learner of a stage."""
        loss, epochs, shared_prefix = Loss(), 1, False
        if isinstance(stage, Rl):
            loss, epochs, shared_prefix = stage.loss, stage.epochs, stage.shared_prefix
        plan = LearnPlan(
            loss=loss,
            optimizer=stage.optimizer,
            total_steps=stage.steps,
            micro_batch=stage.micro_batch,
            epochs=epochs,
            shared_prefix=shared_prefix,
            pad_id=self.eos_id,
        )
        return GrpoLearner(self.policy, self.processor, engine, plan, reference)

    def _load_samples(self, place: Place, store: MediaStore) -> Samples:
        parts: dict[str, tuple[Sample, ...]] = {}
        for name, origins in self._origins().items():
            rejects: list[Reject] = []
            parts[name] = tuple(self._usable(_rows(origins, place), store, rejects))
            self._report(name, parts[name], rejects)
        repeated = {sample.id for sample in parts["train"]} & {s.id for s in (*parts["validation"], *parts["test"])}
        if repeated:
            raise UserError(f"data: sample {min(repeated)!r} is in the training and the held-out data")
        self._check_enough(parts["train"])
        return Samples(**parts)

    def _origins(self) -> dict[str, tuple[Origin, ...]]:
        data = self.config.data
        return {"train": data.train, "validation": data.validation, "test": data.test}

    def _check_enough(self, samples: Sequence[Sample]) -> None:
        for stage in self.config.stages:
            if isinstance(stage, Rl) and stage.prompts_per_step > len(samples):
                raise UserError(
                    f"stage {stage.name!r} asks {stage.prompts_per_step} prompts a step and there are {len(samples)} "
                    "samples: one would get the same rollouts twice; lower prompts_per_step"
                )

    def _check_lessons(self) -> None:
        """What an sft stage imitates must exist and be writable for every sample, before the first step."""
        for imitate in {stage.imitate for stage in self.config.stages if isinstance(stage, Sft)}:
            for sample in self.samples.train:
                answer = lesson(sample, imitate)
                try:
                    self.grammar.render(answer, sample.thought)
                except UserError as error:
                    raise UserError(f"sample {sample.id}: {error}") from error

    def _askable(self) -> Samples:
        """The samples that fit the model's prompt."""
        parts: dict[str, tuple[Sample, ...]] = {}
        for name, samples in self.samples.parts().items():
            reasons = [_refusal(self.processor.encoder, sample) for sample in samples]
            parts[name] = tuple(s for s, reason in zip(samples, reasons, strict=True) if reason is None)
            rejects = [Reject(s.id, reason) for s, reason in zip(samples, reasons, strict=True) if reason is not None]
            self._report(name, parts[name], rejects)
        self._check_enough(parts["train"])
        return Samples(**parts)

    def _usable(self, rows: Iterable[Sample | Reject], store: MediaStore, rejects: list[Reject]) -> Iterable[Sample]:
        """Samples whose pictures open; the others are put among `rejects`."""
        seen: set[str] = set()
        for row in rows:
            if isinstance(row, Reject):
                rejects.append(row)
                continue
            if row.id in seen:
                raise UserError(f"data: two samples have the id {row.id!r}")
            seen.add(row.id)
            try:
                for ref in row.images:
                    store.open(ref)  # videos are opened by their headers, when prompts are measured
            except MediaError as error:
                rejects.append(Reject(row.id, str(error)))
            else:
                yield row

    def _report(self, name: str, samples: Sequence[Sample], rejects: Sequence[Reject]) -> None:
        listed = "\n".join(f"  {reject.id}: {reject.reason}" for reject in rejects[:_LISTED])
        more = f"\n  and {len(rejects) - _LISTED} more" if len(rejects) > _LISTED else ""
        count = f"data.{name}: {len(rejects)} of {len(rejects) + len(samples)} samples cannot be used"
        if rejects and self.config.data.bad_sample == "stop":
            raise UserError(f"{count}:\n{listed}{more}\nrepair them, or leave them out with data.bad_sample=skip")
        if rejects:
            self.console.warn(f"{count} and are left out:\n{listed}{more}")
        if self._origins()[name] and not samples:
            raise UserError(f"data.{name}: there is not one usable sample")

    def _model(self) -> Loaded:
        options = self.config.model
        if options.scratch is not None:
            tokenizer = train_tokenizer(self._texts(options.scratch), options.scratch.language.vocab)
            processor = make_processor(options.scratch, tokenizer, (options.min_pixels, options.max_pixels))
            model = make_model(
                options.scratch,
                tokenizer,
                derive(self.config.run.seed, "init"),
                dtype=options.dtype,
                attention=options.attention,
            )
            return Loaded(family=family_of(model.config), model=model, processor=processor)
        return load_pretrained(options)

    def _texts(self, scratch: Scratch) -> Iterator[str]:
        """What a tokenizer made from scratch learns from: questions and demonstrations of the training samples."""
        for sample in self.samples.train:
            yield from (part for part in sample.parts if isinstance(part, str))
            if self.config.answer.instruct:
                yield " " + self.grammar.instruction(sample.target.kind, FAMILIES[scratch.family].frame)
            for answer in (sample.target, sample.label):
                if answer is not None:
                    yield self.grammar.render(answer, sample.thought)


def _digest(samples: Iterable[Sample]) -> str:
    digest = hashlib.sha256()
    for sample in samples:
        parts = [part.sha256 if isinstance(part, ImageRef) else part for part in sample.parts]
        digest.update(repr((sample.id, parts, sample.target, sample.label, sample.thought)).encode())
    return digest.hexdigest()


def _grammar(options: AnswerGrammar) -> Grammar:
    return Grammar(
        think=options.think,
        style=options.style,
        answer_tag=options.answer_tag,
        think_tag=options.think_tag,
        sections=tuple(Section(**section.model_dump()) for section in options.sections),
        more_stops=options.more_stops,
    )


def _bound_term(term: Term, base: Path) -> BoundTerm:
    reward = bind(resolve(term.fn, base), term.args)
    return BoundTerm(
        name=term.name or reward.reward.name,
        reward=reward,
        weight=term.weight,
        tasks=term.tasks,
        train_only=term.train_only,
    )


def _rows(origins: Sequence[Origin], place: Place) -> Iterator[Sample | Reject]:
    for origin in origins:
        fn = resolve(origin.fn, place.base)
        if not callable(fn):
            raise UserError(f"data: {origin.fn!r} is not a function")
        yield from fn(place, **settle(f"data source {origin.fn!r}", options_of(fn, after=1), origin.args))


def _refusal(encoder: Encoder, sample: Sample) -> str | None:
    """Why a sample cannot be asked, if it cannot."""
    try:
        encoder.measure(sample)
    except UserError as error:
        return str(error)
    return None


def _access(config: Config, base: Path, run_dir: RunDir) -> Access:
    data, limits = config.data, config.data.limits
    return Access(
        roots=(run_dir.data.resolve(), *((base / root).resolve() for root in data.roots)),
        schemes=data.urls,
        max_bytes=limits.max_bytes,
        max_video_bytes=limits.max_video_bytes,
        max_data_url_bytes=limits.max_data_url_bytes,
    )


def _device(config: Config) -> torch.device:
    wanted = config.model.device
    if wanted == "cuda" and not torch.cuda.is_available():
        raise UserError("model.device: there is no usable CUDA device; use `auto` or `cpu`")
    return torch.device("cuda" if wanted != "cpu" and torch.cuda.is_available() else "cpu")
