"""The model card of an export: what it is, how it was made, what it reached."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from mmrl.config import Config, dump_yaml
from mmrl.config.schema import RlStage
from mmrl.log.comparison import TaskComparison

_USAGE = """\
```python
from transformers import AutoModelForImageTextToText, AutoProcessor

model = AutoModelForImageTextToText.from_pretrained("{name}")
processor = AutoProcessor.from_pretrained("{name}")
```

`vllm serve {name}` serves it."""
_ADAPTER_USAGE = """\
```python
from peft import PeftModel
from transformers import AutoModelForImageTextToText

base = AutoModelForImageTextToText.from_pretrained("{base}")
model = PeftModel.from_pretrained(base, "{name}")
```

`vllm serve {base} --enable-lora --lora-modules {name}=PATH` serves it."""


class ModelCardFacts(NamedTuple):
    """What a card tells of a run: `manifest` is its manifest.json, `record` its last step's line of metrics.jsonl."""

    config: Config
    manifest: Mapping[str, Any]
    comparison: Sequence[TaskComparison]
    last_metrics: Mapping[str, Any]
    checkpoint: str


def render_model_card(facts: ModelCardFacts, *, adapter: bool) -> str:
    """README.md of a Hugging Face folder; `adapter` where it holds no model but an adapter alone."""
    return "\n\n".join(_sections(facts, adapter)) + "\n"


def _sections(facts: ModelCardFacts, adapter: bool) -> Iterator[str]:
    config, base = facts.config, facts.config.model.path
    yield "\n".join(["---", *_header(facts.config, adapter), "---"])
    yield f"# {config.run.name}"
    what = "An adapter" if adapter else "A model"
    origin = f"`{base}`" if base else "a model made from nothing"
    stages = ", then ".join(
        f"{stage.algorithm if isinstance(stage, RlStage) else 'imitation'} ({stage.name})" for stage in config.stages
    )
    yield f"{what} from {origin}, trained by mmrl {facts.manifest['mmrl']}: {stages}. Checkpoint {facts.checkpoint}."
    yield (_ADAPTER_USAGE if adapter else _USAGE).format(name=config.run.name, base=base)
    if facts.comparison:
        yield "## Held-out reward\n\nGreedy, with 95 % intervals; the rise is paired over samples."
        yield "\n".join(_table(facts.comparison))
    yield f"## Last step\n\n```json\n{json.dumps(facts.last_metrics, indent=1)}\n```"
    yield "## Data\n\nsha256 over the samples and media of each part:"
    yield "\n".join(f"- {part}: `{digest}`" for part, digest in facts.manifest["data"].items())
    libraries = {name: version for name, version in facts.manifest["libraries"].items() if version}
    yield "## Made with\n\n" + ", ".join(f"{name} {version}" for name, version in libraries.items())
    yield f"## Config\n\n```yaml\n{dump_yaml(config)}```"


def _header(config: Config, adapter: bool) -> Iterator[str]:
    yield f"library_name: {'peft' if adapter else 'transformers'}"
    yield "pipeline_tag: image-text-to-text"
    if config.model.path:
        yield f"base_model: {json.dumps(config.model.path)}"
    yield "tags: [mmrl, reinforcement-learning]"


def _table(rows: Sequence[TaskComparison]) -> Iterator[str]:
    yield "| task | n | before | after | rise |"
    yield "|---|---|---|---|---|"
    for row in rows:
        means = (row.before, row.after, row.improvement)
        cells = [f"{mean.value:.3f} [{_format_bound(mean.low)}, {_format_bound(mean.high)}]" for mean in means]
        yield f"| {row.task} | {row.after.n} | {' | '.join(cells)} |"


def _format_bound(value: float | None) -> str:
    return "?" if value is None else f"{value:.3f}"
