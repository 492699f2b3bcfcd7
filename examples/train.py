"""Train from Python with a reward defined here, then ask the trained model. docs/python.md shows this file."""

import mmrl


@mmrl.reward(name="near", answer_types=(mmrl.AnswerType.NUMBER,))
def near(response: mmrl.Response, sample: mmrl.Sample) -> float:
    """Return 1 for the right number, and less the further off it is."""
    answer = response.answer.value
    return 0.0 if answer is None else 1.0 / (1.0 + abs(answer - sample.target.value))


rewards = [{"fn": near, "when": {"task": ["count"]}}, "mmrl_rewards.format:tags"]
result = mmrl.train("configs/quickstart.yaml", ["stages.cold.steps=2", "stages.rl.steps=2"], rewards=rewards)
print(result.held_out, result.metrics[-1])
policy = mmrl.Policy.from_run(result.run_dir)
picture = next((result.run_dir / "data").rglob("*.png"))
print(policy.generate(picture, "How many red shapes are there?", answer_type="number").text)
