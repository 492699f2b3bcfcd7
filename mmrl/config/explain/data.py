"""In words: where the samples of a stage come from, in which order, and what a stage that makes data does."""

from __future__ import annotations

from mmrl.config.schema import (
    BenchmarkConfig,
    Config,
    CurriculumOrderConfig,
    CurriculumPhaseConfig,
    DataOrderConfig,
    MixtureOrderConfig,
    PriorityOrderConfig,
    RlStage,
    SampleConditions,
    SampleStage,
    SelectStage,
    SftStage,
    ShuffledOrderConfig,
    SortedOrderConfig,
    TrainingStage,
)


def explain_sample_stage(stage: SampleStage) -> list[tuple[str, str]]:
    """What a stage that samples does."""
    return [
        ("each step", f"{stage.prompts_per_step} prompts x {stage.group_size} rollouts, with their reward terms"),
        ("samples", _explain_source(stage)),
        ("ends", "after " + ("all samples" if stage.steps is None else f"{stage.steps} steps")),
    ]


def explain_select_stage(stage: SelectStage) -> list[tuple[str, str]]:
    """What a stage that selects keeps."""
    low, high = stage.range
    bounds = f"{stage.metric} from {low:g}" + ("" if high is None else f" to {high:g}")
    top = f"; of these the {stage.top_k} greatest" if stage.top_k else ""
    right = f"right is a response of which {' and '.join(stage.correct)} (where they apply) reach {stage.threshold:g}"
    most = f", {stage.max_responses} of a sample at most, the shortest" if stage.max_responses else ""
    return [
        ("from", f"what stage {stage.from_stage} found out"),
        ("keeps", f"samples with {bounds}{top}"),
        *([("", right)] if stage.correct else []),
        ("as", f"their right responses{most}" if stage.output == "responses" else "prompts to be asked anew"),
    ]


def _explain_source(stage: TrainingStage | SampleStage) -> str:
    whose = "those of data.train" if stage.from_stage is None else f"those that stage {stage.from_stage} kept"
    return f"{whose} of which {_explain_conditions(stage.when)}" if stage.when else whose


def explain_training_data(stage: TrainingStage) -> list[tuple[str, str]]:
    """The samples of a stage that trains, and their order."""
    repeated = f", repeated to {stage.repeat_samples_to}" if stage.repeat_samples_to else ""
    return [("samples", _explain_source(stage) + repeated), ("order", _explain_data_order(stage.data_order))]


def explain_benchmarks(config: Config, stage: SftStage | RlStage) -> list[tuple[str, str]]:
    """What is taken while a stage trains, a line for each."""
    before = "before the first step, " if stage is config.training_stages[0] else ""
    lines = []
    for benchmark in config.evaluation.benchmarks:
        rules = f" by the rules of {benchmark.benchmark_name}" if benchmark.benchmark_name != benchmark.name else ""
        often = f"every {benchmark.every} steps, " if benchmark.every else ""
        when = f"{before}{often}and as the stage ends" if before or often else "as the stage ends"
        lines.append(f"{benchmark.name}{rules}, {when}: {_benchmark_metrics(benchmark, config)}")
    return [("benchmarks", "\n".join(lines))] if lines else []


def _benchmark_metrics(benchmark: BenchmarkConfig, config: Config) -> str:
    accuracy = f"benchmark/{benchmark.name}/accuracy"
    if benchmark.responses_per_question == 1:
        return accuracy
    temperature = config.evaluation.benchmark_temperature(benchmark)
    return (
        f"{accuracy}, pass@k and maj@k of {benchmark.responses_per_question} responses at temperature {temperature:g}"
    )


def _explain_data_order(order: DataOrderConfig) -> str:
    match order:
        case ShuffledOrderConfig():
            return "shuffled anew for each epoch; sources with a weight in their shares"
        case SortedOrderConfig():
            return f"by {order.column or 'their sources'}{', descending' if order.descending else ''}, the same every epoch"
        case MixtureOrderConfig():
            points = ", ".join(
                f"{':'.join(f'{w:g}' for w in weights)} at step {step}" for step, weights in order.points
            )
            return f"sources mixed {points}, {'in steps' if order.interpolation == 'steps' else 'linear between'}"
        case PriorityOrderConfig():
            worth = "4 p (1 - p)" if order.weight_by == "uncertainty" else "1 - p"
            return f"drawn in proportion to {worth}, at least {order.min_weight:g}, p a sample's last mean reward"
        case CurriculumOrderConfig():
            return "\n".join(f"phase {k}: {_explain_phase(phase)}" for k, phase in enumerate(order.phases))


def _explain_conditions(when: SampleConditions) -> str:
    return " and ".join(f"{column} is {' or '.join(allowed)}" for column, allowed in when.items())


def _explain_phase(phase: CurriculumPhaseConfig) -> str:
    which = _explain_conditions(phase.when)
    ends = [f"{phase.max_samples} samples were drawn"] if phase.max_samples else []
    if phase.plateau:
        ends.append(
            f"{phase.plateau.window} steps are not {phase.plateau.min_improvement:g} better than as many before"
        )
    until = f", until {' or '.join(ends)}" if ends else ""
    return f"samples of which {which or 'nothing is asked'}{until}"
