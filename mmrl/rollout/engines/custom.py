"""Rollout engines of the user's own: `rollout: {engine: {fn: ./mine.py:make_engine, args: {..}}}`."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from mmrl.config.schema import CustomEngineConfig
from mmrl.distributed.ranks import Ranks
from mmrl.policy.policy import Policy
from mmrl.policy.processor import PromptProcessor
from mmrl.ports import Sampler
from mmrl.utils.plugin_args import check_methods
from mmrl.utils.plugins import load_plugin

_SAMPLER_METHODS = ("generate", "extend", "sync", "close")


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineContext:
    """Everything that a function of the user's needs to make a `Sampler`.

    The function is called once for each stage that samples, once for the evaluation and once for each benchmark of a
    run, on every rank.
    """

    policy: Policy
    """The learner's policy. A sampler starts with its weights of the moment; `sync` tells that they have changed."""
    processor: PromptProcessor
    """Encodes prompts, and parses responses."""
    salt: tuple[str | int, ...]
    """Sets the random numbers of this sampler apart from those of others: derive seeds from it."""
    version: int
    """Policy version that segments carry until the first `sync`."""
    concurrent: bool
    """True if the learner updates the policy while this sampler generates (`async_rollouts`): sample from a copy."""
    record_routes: bool
    """True if rollouts must carry the experts that their tokens went to (`loss.routing_replay: engine`)."""
    work_dir: Path
    """Folder for files of the engine. It may not exist yet."""
    ranks: Ranks
    """All processes of the run. A sampler generates for its own rank; `sync` is called on all ranks together."""
    warn: Callable[[str], None]
    """Prints a warning on the console."""


def load_engine(config: CustomEngineConfig, base_dir: Path) -> Callable[[EngineContext], Sampler]:
    """Load the user's function and settle its options; what it returns is checked to be a `Sampler`.

    Raises:
        UserError: there is no such function, or an option is unknown, missing or of the wrong type.
    """
    make_sampler = load_plugin(config.fn, base_dir, config.args, role="rollout engine", parameters=("context",))

    def make_checked_sampler(context: EngineContext) -> Sampler:
        sampler: Sampler = make_sampler(context)
        check_methods(sampler, Sampler, _SAMPLER_METHODS, owner=f"rollout.engine {config.fn!r}")
        return sampler

    return make_checked_sampler
