"""A rollout step of your own: it makes a response that was cut off give an answer (budget forcing, arXiv:2501.19393).

rollout_steps: [{kind: generate}, {fn: ./rollout_step.py:make_step, args: {max_new_tokens: 8}, max_added_tokens: 24}]
"""

from dataclasses import replace

from mmrl import Author, FinishReason, RolloutBatch, RolloutContext, Segment, add_metrics


class ForceAnswer:
    """Appends the words that introduce an answer to responses that reached their length limit, and continues them."""

    def __init__(self, context: RolloutContext, text: str, max_new_tokens: int) -> None:
        self.sampler = context.sampler
        self.sampling_params = replace(context.sampling_params, max_new_tokens=max_new_tokens)
        token_ids = context.processor.tokenize(text)
        self.words = Segment(token_ids=token_ids, logprobs=(0.0,) * len(token_ids), author=Author.FORCED)

    def __call__(self, batch: RolloutBatch, *, step: int) -> RolloutBatch:
        """Return the batch with an answer forced from each response that was cut off."""
        groups = [list(group) for group in batch.groups]
        places, forced = [], []
        for group_index, group in enumerate(groups):
            for position, rollout in enumerate(group):
                if rollout.finish_reason is FinishReason.LENGTH:
                    places.append((group_index, position))
                    forced.append(replace(rollout, segments=(*rollout.segments, self.words)))
        answered = self.sampler.extend(forced, self.sampling_params, step=step)  # appends segments by POLICY
        for (group_index, position), rollout in zip(places, answered, strict=True):
            groups[group_index][position] = rollout
        metrics = {"force_answer/count": float(len(places))}
        return add_metrics(replace(batch, groups=tuple(map(tuple, groups))), metrics)


def make_step(context: RolloutContext, *, text: str = "\n<answer>", max_new_tokens: int = 16) -> ForceAnswer:
    """Make the step; mmrl calls this for each stage and for the evaluation, wherever the config names it."""
    return ForceAnswer(context, text, max_new_tokens)
