"""In words: where the samples of a stage come from, in which order, and what a stage that makes data does."""

from __future__ import annotations

from mmrl.config.schema import (
    Benchmark,
    Config,
    Curriculum,
    Mixture,
    Order,
    Phase,
    Priority,
    Rl,
    Sample,
    Select,
    Sft,
    Shuffled,
    Sorted,
    Stage,
    When,
)


def sample(stage: Sample) -> list[tuple[str, str]]:
    """What a stage that samples does."""
    return [
        ("each step", f"{stage.prompts_per_step} prompts x {stage.group_size} rollouts, with their reward terms"),
        ("samples", _from(stage)),
        ("ends", "after " + ("all samples" if stage.steps is None else f"{stage.steps} steps")),
    ]


def select(stage: Select) -> list[tuple[str, str]]:
    """What a stage that selects keeps."""
    low, high = stage.within
    bounds = f"{stage.by} from {low:g}" + ("" if high is None else f" to {high:g}")
    top = f"; of these the {stage.top} greatest" if stage.top else ""
    right = f"right is a response of which {' and '.join(stage.right)} (where they apply) reach {stage.right_from:g}"
    most = f", {stage.most} of a sample at most, the shortest" if stage.most else ""
    return [
        ("from", f"what stage {stage.source} found out"),
        ("keeps", f"samples with {bounds}{top}"),
        *([("", right)] if stage.right else []),
        ("as", f"their right responses{most}" if stage.keep == "responses" else "prompts to be asked anew"),
    ]


def _from(stage: Stage | Sample) -> str:
    whose = "those of data.train" if stage.source is None else f"those that stage {stage.source} kept"
    return f"{whose} of which {_conditions(stage.when)}" if stage.when else whose


def training(stage: Stage) -> list[tuple[str, str]]:
    """The samples of a stage that trains, and their order."""
    repeated = f", repeated to {stage.repeat_to}" if stage.repeat_to else ""
    return [("samples", _from(stage) + repeated), ("order", _order(stage.order))]


def benchmarks(config: Config, stage: Sft | Rl) -> list[tuple[str, str]]:
    """What is taken while a stage trains, a line for each."""
    before = "before the first step, " if stage is config.trainings[0] else ""
    lines = []
    for benchmark in config.evaluation.benchmarks:
        rules = f" by the rules of {benchmark.rules}" if benchmark.rules != benchmark.name else ""
        often = f"every {benchmark.every} steps, " if benchmark.every else ""
        when = f"{before}{often}and as the stage ends" if before or often else "as the stage ends"
        lines.append(f"{benchmark.name}{rules}, {when}: {_told(benchmark, config)}")
    return [("benchmarks", "\n".join(lines))] if lines else []


def _told(benchmark: Benchmark, config: Config) -> str:
    accuracy = f"bench/{benchmark.name}/accuracy"
    if benchmark.samples == 1:
        return accuracy
    temperature = config.evaluation.temperature_of(benchmark)
    return f"{accuracy}, pass@k and maj@k of {benchmark.samples} responses at temperature {temperature:g}"


def _order(order: Order) -> str:
    match order:
        case Shuffled():
            return "shuffled anew for each epoch; sources with a weight in their shares"
        case Sorted():
            return f"by {order.by or 'their sources'}{', descending' if order.descending else ''}, the same every epoch"
        case Mixture():
            points = ", ".join(
                f"{':'.join(f'{w:g}' for w in weights)} at step {step}" for step, weights in order.points
            )
            return f"sources mixed {points}, {'in steps' if order.shape == 'steps' else 'linear between'}"
        case Priority():
            worth = "4 p (1 - p)" if order.by == "uncertainty" else "1 - p"
            return f"drawn in proportion to {worth}, at least {order.floor:g}, p a sample's last mean reward"
        case Curriculum():
            return "\n".join(f"phase {k}: {_phase(phase)}" for k, phase in enumerate(order.phases))


def _conditions(when: When) -> str:
    return " and ".join(f"{column} is {' or '.join(allowed)}" for column, allowed in when.items())


def _phase(phase: Phase) -> str:
    which = _conditions(phase.when)
    ends = [f"{phase.samples} samples were drawn"] if phase.samples else []
    if phase.plateau:
        ends.append(f"{phase.plateau.window} steps are not {phase.plateau.rise:g} better than as many before")
    until = f", until {' or '.join(ends)}" if ends else ""
    return f"samples of which {which or 'nothing is asked'}{until}"
