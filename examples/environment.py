"""An environment of your own: a hidden number is found by guesses, each answered with "higher" or "lower"."""

from mmrl import Environment, Observation, Sample, StepResult


class GuessNumber:
    """An episode. The number follows from the seed, so siblings look for the same one."""

    def __init__(self, largest: int) -> None:
        self.low, self.high = 1, largest  # bounds of the hidden number

    def reset(self, sample: Sample, seed: int) -> Observation:
        """Choose a number and ask for it."""
        self.number = 1 + seed % self.high
        return Observation(text=f"Guess my number, from 1 to {self.high}. Answer with the number alone.")

    def step(self, action: str) -> StepResult:
        """Say whether the number is higher or lower than a guess."""
        if not action.isdecimal():
            return StepResult(observation=Observation(text="That is not a number."), valid=False)
        guess = int(action)
        if guess == self.number:
            return StepResult(reward=1.0, terminated=True, info={"success": 1.0})
        if guess < self.number:
            self.low, hint = max(self.low, guess + 1), "higher"
        else:
            self.high, hint = min(self.high, guess - 1), "lower"
        return StepResult(observation=Observation(text=f"It is {hint}.", state=f"{self.low} to {self.high}"))

    def expert(self) -> str:
        """Guess the middle of what is left."""
        return str((self.low + self.high) // 2)

    def close(self) -> None:
        """Nothing has to be closed."""


def make(*, largest: int = 20) -> Environment:
    """Make the environment of one episode."""
    return GuessNumber(largest)
