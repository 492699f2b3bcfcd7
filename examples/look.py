"""A reward that looks: 1 if the answer names the colour that the picture shows inside a box of the row."""

from colorsys import rgb_to_hsv

from mmrl import AnswerType, MediaRangeError, Response, RewardValue, Sample, Unscorable, reward
from mmrl_rewards import answer_value, column_value, target_value

HUES = ((15, "red"), (45, "orange"), (70, "yellow"), (170, "green"), (260, "blue"), (345, "purple"), (360, "red"))


def name_colour(red: float, green: float, blue: float) -> str:
    """Return the name of a colour; red, green and blue are from 0 to 255."""
    hue, saturation, brightness = rgb_to_hsv(red / 255, green / 255, blue / 255)
    if brightness < 0.2:
        return "black"
    if saturation < 0.2:
        return "white" if brightness > 0.8 else "grey"
    return next(name for end, name in HUES if 360 * hue <= end)


@reward(name="colour", answer_types=(AnswerType.TEXT,), looks=True)
def colour(response: Response, sample: Sample, *, column: str = "box") -> RewardValue:
    """Return 1 if the answer is the name of the mean colour inside the row's box, x1, y1, x2, y2 in pixels, else 0.

    Source: this example; hues as on the colour circle. Departures: none.
    Unscorable: the picture cannot be opened, or the row's box is not within it.
    """
    target_value(sample, AnswerType.TEXT)
    try:
        pixels = sample.crop(column_value(sample, column))
    except (TypeError, ValueError, MediaRangeError) as error:
        raise Unscorable(f"the box of the row: {error}") from error
    shown = name_colour(*pixels.mean(axis=0).mean(axis=0))
    answer = answer_value(response).strip(" .").casefold()
    return RewardValue(float(answer == shown), f"{answer}, and the picture shows {shown}")
