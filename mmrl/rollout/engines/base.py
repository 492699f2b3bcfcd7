"""The protocol of a rollout engine: requests go in, token ids and log-probabilities come out.

It is implemented by transformers, vLLM in this process, vLLM servers, and an engine that a user writes.
`mmrl.rollout.shared_engine` chooses one, and `mmrl.rollout.engine_sampler` turns what it generates into rollouts.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

from mmrl.distributed.ranks import Ranks
from mmrl.policy.lora import LoraAdapter
from mmrl.policy.policy import PolicyModel
from mmrl.policy.processor import PromptProcessor
from mmrl.rollout.responses import GeneratedTokens
from mmrl.rollout.weight_sync import WeightStream
from mmrl.types import Rollout, SamplingParams
from mmrl.utils.activity import Activity


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerationRequest:
    """A request for one or several continuations of a prompt, or of a response to it."""

    rollout: Rollout
    """Prompt and response so far; the response may be empty. All continuations have this prompt."""
    seed: int
    """Random seed of the request, at least 0, for an engine that derives a seed for each continuation from it."""
    sample_seeds: tuple[int, ...]
    """Random seed of each continuation, at least 0, for an engine that takes one seed per continuation."""

    @property
    def num_samples(self) -> int:
        """Number of continuations to generate."""
        return len(self.sample_seeds)


class RolloutEngine(Protocol):
    """Generates tokens with the policy's weights. One engine serves all samplers of a run, on each rank.

    A class that inherits from it need not define `sleep`, `close` or the attributes whose defaults fit.
    """

    max_model_len: int | None = None
    """Most tokens that a prompt and its response may have together; None if only the model limits them."""
    shares_weights: bool = False
    """True if it generates with the learner's own tensors. It then always has the current weights."""
    returns_routes: bool = False
    """True if it can return the experts that tokens were sent to."""

    def generate(
        self, requests: Sequence[GenerationRequest], sampling_params: SamplingParams, *, record_routes: bool
    ) -> Sequence[Sequence[GeneratedTokens]]:
        """Return `num_samples` continuations of each request, in order. Wakes the engine if it sleeps.

        `sampling_params.max_new_tokens` limits only the new tokens. With `record_routes` the continuations carry the
        experts that prompt and response were sent to.

        Raises:
            UserError: a prompt cannot be used, or the engine failed and is not restarted.
        """

    def load_weights(self, weights: WeightStream) -> None:
        """Replace the weights and drop every cache that the old ones filled. Wakes the engine if it sleeps.

        Called once for each policy version, on all ranks together, and never while `generate` runs.

        Raises:
            UserError: the engine runs another model, or holds other weights after the transfer.
        """

    def logits_dtypes(self) -> set[str]:
        """Return the dtypes that logits are computed in, such as `float32`; several if its processes differ."""

    def sleep(self) -> None:
        """Free memory on the learner's device, if the engine uses any; called before each step of the learner."""
        return  # a body, so that subclasses need not define it

    def close(self) -> None:
        """End processes and connections. Calls that still run in other threads fail."""
        return


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineContext:
    """Everything that an engine is made from. Engines are made once for a run, on every rank."""

    policy: PolicyModel
    """The learner's policy, with the weights that the run begins with; a resumed run loads others later."""
    processor: PromptProcessor
    """Returns the token ids and encoded media of prompts and responses."""
    adapter: LoraAdapter | None
    """Adapter that the policy trains, if any. `load_weights` receives matrices with the adapter merged into them; the
    vLLM engines ignore these where they load the adapter's files."""
    model_folder: Callable[[], str]
    """Returns the folder, or hub id, of the model without adapter. A model made from scratch is exported to a
    folder first, so all ranks must call it together."""
    max_model_len: int
    """Most tokens that the run needs for a prompt and its response together."""
    concurrent: bool
    """True if the learner updates the policy while the engine generates (`async_rollouts`). The engine then needs
    its own weights, and is never put to sleep."""
    record_routes: bool
    """True if a stage needs the experts that tokens were sent to (`loss.routing_replay: engine`)."""
    work_dir: Path
    """Folder for files of this rank's engine. It may not exist yet."""
    ranks: Ranks
    """All processes of the run. Each rank's engine generates only for that rank."""
    warn: Callable[[str], None]
    """Prints a warning on the console."""
    activity: Activity = field(default_factory=Activity)
    """Progress on the console. `begin_count("rollout", total)` and `advance("rollout", n)` count finished responses."""
