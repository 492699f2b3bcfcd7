"""A user's own rollout engine: `rollout: {engine: {fn: ./mine.py:make_engine, args: {..}}}`."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from mmrl.config.schema import CustomEngineConfig
from mmrl.rollout.engines.base import EngineContext, RolloutEngine
from mmrl.types import UserError
from mmrl.utils.plugin_args import check_methods
from mmrl.utils.plugins import load_plugin


def load_engine(config: CustomEngineConfig, base_dir: Path) -> Callable[[EngineContext], RolloutEngine]:
    """Load the user's function and check its options; what it returns is checked to be a `RolloutEngine`.

    Raises:
        UserError: there is no such function, or an option is unknown, missing or of the wrong type.
    """
    make_engine = load_plugin(config.fn, base_dir, config.args, role="rollout engine", parameters=("context",))

    def make_checked_engine(context: EngineContext) -> RolloutEngine:
        engine: RolloutEngine = make_engine(context)
        owner = f"rollout.engine {config.fn!r}"
        methods = ("generate", "load_weights", "logits_dtypes", "sleep", "close")
        check_methods(engine, RolloutEngine, methods, owner=owner)
        for name in ("max_model_len", "shares_weights", "returns_routes"):
            if name not in dir(engine):
                raise UserError(
                    f"{owner} returned {engine!r:.80}, which has no attribute {name!r}; set it, or inherit the default "
                    f"from {RolloutEngine.__module__}.{RolloutEngine.__name__}"
                )
        return engine

    return make_checked_engine
