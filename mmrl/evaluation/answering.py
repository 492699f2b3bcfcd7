"""A model that answers single questions without a known right answer, for `mmrl.Policy`."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Final

from mmrl.evaluation.eval_settings import EvalRequest, make_eval_config
from mmrl.evaluation.model_source import LoadedModel, find_model_source, load_model
from mmrl.evaluation.session import open_pipeline
from mmrl.log.console import Console
from mmrl.media.checks import make_media_policy
from mmrl.protocols import RolloutPipeline
from mmrl.rollout.available import check_model_and_libraries
from mmrl.rollout.load import load_rollout_steps
from mmrl.scoring.scorer import make_response
from mmrl.types import Response, Sample, Score, UserError

_NO_REWARDS: Final = (
    "a rollout step of this run asks which responses are correct, and a question without a right answer has none; "
    "leave the step out with overrides=['evaluation.rollout_steps=[{kind: generate}]']"
)


@contextmanager
def open_model(
    run: str, checkpoint: str | None, overrides: Sequence[str], work_dir: Path
) -> Iterator[Callable[[Sample], Response]]:
    """Load a run directory, a checkpoint of one, or a folder of transformers; yield the function that answers a sample.

    `overrides` are settings of an evaluation; files for a rollout engine in another process go into `work_dir`.

    Raises:
        UserError: there is no such model, or a setting is invalid.
    """
    console = Console()
    source = find_model_source(run, checkpoint, console.warn)
    request = EvalRequest(model=run, benchmark="canonical", data_files=(), out_dir=Path(), overrides=overrides)
    settings = make_eval_config(request, source.path, source.config, is_checkpoint=source.checkpoint_dir is not None)
    check_model_and_libraries(settings)
    # The caller names every file, so it may lie anywhere.
    media_policy = make_media_policy(settings.media_limits, [Path("/")], schemes=(), media=settings.media)
    model = console.wait_for("loading the model", partial(load_model, source, settings, media_policy))
    with open_pipeline(
        settings,
        model,
        _NoRewards(),
        custom_steps=load_rollout_steps(settings.evaluation.rollout_steps, source.base_dir),
        work_dir=work_dir,
        console=console,
    ) as pipeline:
        yield partial(_answer, model, pipeline)


def _answer(model: LoadedModel, pipeline: RolloutPipeline, sample: Sample) -> Response:
    batch = pipeline.run([model.processor.build(sample)], step=0)
    return make_response(batch.groups[0][0])


class _NoRewards:
    """Refuses to score: a question without a right answer has no reward."""

    def score_eval(self, rollouts: object) -> Sequence[Score]:
        """Raise a UserError."""
        raise UserError(_NO_REWARDS)
