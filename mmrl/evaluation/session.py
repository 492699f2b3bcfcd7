"""Generation of an evaluation's responses, in one folder that survives kills."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from functools import partial
from itertools import accumulate, chain
from pathlib import Path
from typing import Any

from mmrl.benchmarks.predictions import Prediction, append_predictions
from mmrl.benchmarks.readers.questions import BenchmarkQuestions
from mmrl.benchmarks.report import ScoredRun
from mmrl.config import EvalConfig
from mmrl.distributed.ranks import Ranks, SingleProcess, own_slice
from mmrl.evaluation.eval_dir import EvalDir
from mmrl.evaluation.graders import make_prediction
from mmrl.evaluation.model_source import LoadedModel
from mmrl.evaluation.question_set import QuestionSet
from mmrl.log.console import Console
from mmrl.log.run_dir import RunDir
from mmrl.policy.build import build_response_format
from mmrl.policy.processor import PromptProcessor
from mmrl.protocols import EvalScorer, RolloutPipeline
from mmrl.rollout.environments.pictures import PICTURES_FOLDER
from mmrl.rollout.load import load_engine
from mmrl.rollout.pipeline import build_pipeline
from mmrl.rollout.shared_engine import SharedEngine
from mmrl.rollout.steps.base import RolloutContext, StepFactory
from mmrl.rollout.tools.executor import ToolRunner
from mmrl.types import FinishReason, Sample, UserError
from mmrl.utils.digests import text_digest
from mmrl.utils.messages import first_lines
from mmrl.utils.seeds import derive_seed


class EvalBatches:
    """The questions that can be asked, in batches; predictions are saved batch by batch."""

    def __init__(
        self, questions: BenchmarkQuestions, missing: Mapping[str, str], *, batch_size: int, responses_per_question: int
    ) -> None:
        """Leave out the questions whose item ids are in `missing`; `batch_size` counts questions."""
        asked = []
        for question in questions.entries:
            if question.sample and question.item.id not in missing:
                asked.append((question.item.id, question.sample))
        starts = range(0, len(asked), batch_size)
        self.batches = [asked[start : start + batch_size] for start in starts]  # item id and sample of each question
        self.rows_per_batch = [len(batch) * responses_per_question for batch in self.batches]  # predictions of each

    def is_complete(self, predictions: Sequence[Prediction]) -> bool:
        """Return True when every question has all its responses."""
        return len(predictions) == sum(self.rows_per_batch)


def grade_predictions(
    question_set: QuestionSet,
    predictions: Sequence[Prediction],
    eval_config: EvalConfig,
    *,
    model: str,
    data_files: Sequence[str],
    identity: Mapping[str, Any],
) -> ScoredRun:
    """Return all verdicts, with what the section `generation` of a report says.

    `model` names the model there, and `identity` is the result of `evaluation_identity`.
    """
    generation = eval_config.evaluation
    settings = {
        "model": model,
        "revision": identity["model"],
        "data": list(data_files),
        "data_sha256": identity["data"],
        "left_out": question_set.questions.num_unscorable,
        "pixels": [eval_config.model.min_pixels, eval_config.model.max_pixels],
        "dtype": eval_config.model.dtype,
        "engine": eval_config.rollout.engine_name,
        "temperature": generation.temperature,
        "top_p": eval_config.top_p,
        "top_k": eval_config.top_k,
        "max_new_tokens": generation.max_new_tokens,
        "stop": list(build_response_format(eval_config).all_stop_strings),
        "responses_per_question": eval_config.responses_per_question,
        "seed": eval_config.run.seed,
        "response_format": eval_config.response_format.model_dump(mode="json"),
        "rollout_steps": [step.model_dump(mode="json") for step in generation.rollout_steps],
        "corruption": eval_config.corruption,
        # A prompt's own digest covers its text, images and positions.
        "prompts": text_digest("".join(prediction.prompt_digest for prediction in predictions)),
    }
    return question_set.grader.grade_run(predictions, settings)


def find_unusable_questions(questions: BenchmarkQuestions, measure: Callable[[Sample], object]) -> dict[str, str]:
    """Return the reasons why questions cannot be asked, by item id.

    `measure` opens the media of a sample and measures its prompt; it raises UserError when it does not fit.
    """
    problems = {}
    for question in questions.entries:
        if question.sample is None:
            problems[question.item.id] = question.problem
            continue
        try:
            measure(question.sample)
        except UserError as error:
            problems[question.item.id] = str(error)
    return problems


def check_missing(
    missing: Mapping[str, str],
    questions: BenchmarkQuestions,
    *,
    allowed: bool,
    remedy: str,
    warn: Callable[[str], None],
) -> None:
    """Report the questions that cannot be asked, and the rows that no rule scores.

    With `allowed`, missing questions count as incorrect; `remedy` names the setting that does so, for the message.

    Raises:
        UserError: questions are missing and not allowed to, or none is left.
    """
    num_questions = len(questions.entries)
    num_rows = num_questions + questions.num_unscorable
    if questions.num_unscorable:
        warn(f"{questions.num_unscorable} of {num_rows} rows are left out, as they cannot be scored")
    if not missing:
        return
    lines = first_lines([f"{id}: {reason}" for id, reason in missing.items()])
    head = f"{len(missing)} of {num_questions} questions cannot be asked"
    if not allowed or len(missing) == num_questions:
        raise UserError("\n".join([f"{head}:", *lines, f"repair them, or count them as incorrect with {remedy}"]))
    warn("\n".join([f"{head} and count as incorrect:", *lines]))


def build_eval_pipeline(
    eval_config: EvalConfig,
    scorer: EvalScorer,
    *,
    engine: SharedEngine,
    processor: PromptProcessor,
    tool_runner: ToolRunner,
    custom_steps: Mapping[str, StepFactory],
) -> RolloutPipeline:
    """Return the pipeline that answers questions, with the rollout steps of the settings.

    `scorer` tells steps which responses are correct; `custom_steps` makes the user's steps, by name.

    Raises:
        UserError: a step cannot run with this model or these questions.
    """
    context = RolloutContext(
        sampler=engine.make_sampler(eval_config.run.seed, "evaluation"),
        scorer=scorer,
        processor=processor,
        sampling_params=engine.build_sampling_params(eval_config),
        group_size=eval_config.responses_per_question,
        prompts_per_step=eval_config.evaluation.batch_size,
        seed=derive_seed(eval_config.run.seed, "evaluation"),
        tool_runner=tool_runner,
        custom_steps=custom_steps,
    )
    return build_pipeline(eval_config.evaluation.rollout_steps, context)


@contextmanager
def open_pipeline(
    eval_config: EvalConfig,
    model: LoadedModel,
    scorer: EvalScorer,
    *,
    custom_steps: Mapping[str, StepFactory],
    work_dir: Path,
    console: Console,
) -> Iterator[RolloutPipeline]:
    """Start the rollout engine of a loaded model, and yield the pipeline that answers questions.

    Files of an engine in another process, and pictures of environments, go into `work_dir`, as into that of a run.

    Raises:
        UserError: the engine does not start; else as `build_eval_pipeline`.
    """
    engine = SharedEngine(
        eval_config,
        model.policy,
        model.processor,
        adapter=model.adapter,
        work_dir=RunDir(work_dir).engine,
        ranks=SingleProcess(),
        console=console,
        make_custom_engine=load_engine(eval_config.rollout.engine, model.base_dir),
    )
    tool_runner = ToolRunner(model.base_dir, pictures_dir=RunDir(work_dir).data / PICTURES_FOLDER)
    with closing(engine), closing(tool_runner):
        # The version stays 0, because the weights do not change here.
        engine.sync_weights(0)
        yield build_eval_pipeline(
            eval_config,
            scorer,
            engine=engine,
            processor=model.processor,
            tool_runner=tool_runner,
            custom_steps=custom_steps,
        )


def generate_predictions(
    batches: EvalBatches,
    earlier: Sequence[Prediction],
    *,
    question_set: QuestionSet,
    eval_dir: EvalDir,
    processor: PromptProcessor,
    pipeline: RolloutPipeline,
    console: Console,
    ranks: Ranks,
) -> list[Prediction]:
    """Generate the responses that `earlier` lacks, save each batch, and return all predictions.

    Raises:
        UserError: a question cannot be asked after all, or the disk is full.
    """
    predictions = list(earlier)
    num_correct = sum(verdict.strict for verdict in question_set.grader.grade(earlier))
    # Earlier predictions fill whole batches, so their number is one of these sums.
    num_done = list(accumulate(batches.rows_per_batch, initial=0)).index(len(earlier))
    num_batches = len(batches.batches)
    console.start_stage(question_set.name, num_batches, num_done)
    activity_name = f"answering {question_set.name}"
    # Batches of an earlier process are not counted: they would distort the estimate of the time left.
    console.activity.begin_count(activity_name, num_batches - num_done)
    for number, batch in enumerate(batches.batches[num_done:], num_done + 1):
        new_predictions = _answer_batch(batch, processor, pipeline, ranks)
        # Saved before the next batch begins, so that a kill costs one batch.
        ranks.on_rank0(partial(append_predictions, eval_dir.predictions_file, new_predictions))
        predictions += new_predictions
        num_correct += sum(verdict.strict for verdict in question_set.grader.grade(new_predictions))
        num_truncated = sum(prediction.finish_reason is FinishReason.LENGTH for prediction in predictions)
        num_tokens = sum(prediction.num_tokens for prediction in predictions)
        progress = {
            "accuracy": num_correct / len(predictions),
            "rollout/truncated_frac": num_truncated / len(predictions),
            "rollout/response_tokens_mean": num_tokens / len(predictions),
        }
        console.show_step(number, progress, {})
        console.activity.advance(activity_name)
    console.end_stage()
    return predictions


def _answer_batch(
    batch: Sequence[tuple[str, Sample]], processor: PromptProcessor, pipeline: RolloutPipeline, ranks: Ranks
) -> list[Prediction]:
    """Return the responses to a batch. Collective: every rank answers its share and receives all of them."""
    own_share = batch[own_slice(len(batch), ranks)]
    predictions = []
    if own_share:
        prompts = [processor.build(sample) for _, sample in own_share]
        # Step 0 throughout: the seed of a response must not depend on how many batches came before.
        answered = pipeline.run(prompts, step=0)
        for (item_id, _), group in zip(own_share, answered.groups, strict=True):
            for rollout in group:
                predictions.append(make_prediction(item_id, rollout, processor.text_before_continuation(rollout)))
    # A rank without a share must make this call, too, or the others would wait for it.
    return list(chain.from_iterable(ranks.all_gather(predictions)))
