"""`check_reward`: tests the contract of a reward. For users who write their own."""

import math
from collections.abc import Sequence
from typing import Any

from lmgym.core.errors import LmgymError
from lmgym.rewards.base import build_rewards, call_reward, check_examples
from lmgym.types import Episode, Example, Turn

# A reward that asks a model in float32 adds the same numbers in another order when the batch is another one. Two orders
# of a sum of n terms differ by up to n times the machine epsilon (2^-23), times the size of the terms; on its way
# through a model's layers a number is a sum of some thousands: 4096 * 2^-23 = 2^-11, relative to the number or to 1.
TOLERANCE = 4096 * 2.0**-23

SAMPLE_TEXTS = (
    "The answer is: 18",
    "",
    "Don't stop, don't STOP!\n#### 1,234",
    " ",
    "\u00e9t\u00e9 \U0001f600 \\boxed{\\frac{1}{2}}",
    "no number here " * 40,
)


def check_reward(
    name: str, texts: Sequence[str] | None = None, examples: Sequence[Example] | None = None, **arguments: Any
) -> None:
    """Raise LmgymError, with one sentence, if the reward breaks its contract. Use it in the tests of your own rewards.

    Held: one finite number per text, the empty text included, and the same number whether a text is scored
    alone, in a batch, or in the batch reversed (up to TOLERANCE); and the reward can work with the examples.
    Without `texts` and `examples` a small sample is used.

    Example:
        >>> check_reward("length", target=50)
    """
    reward = build_rewards({name: arguments})[0]
    texts = SAMPLE_TEXTS if texts is None else texts
    if examples is None:
        examples = [
            Example(f"sample/{index}", "How many?", ("9 * 2 = 18\n#### 18", "18")) for index in range(len(texts))
        ]
    if not texts or len(texts) != len(examples):
        raise LmgymError(
            f"check_reward needs as many texts as examples, and at least one: {len(texts)}, {len(examples)}"
        )
    check_examples([reward], examples)
    texts, examples = [*texts, ""], [*examples, examples[0]]
    sampled = [
        Episode(example, group=index, index=index, turns=[Turn(prompt_ids=[], action_ids=[], text=text)])
        for index, (text, example) in enumerate(zip(texts, examples, strict=True))
    ]
    batch = call_reward(reward, sampled)
    reversed_batch = call_reward(reward, sampled[::-1])[::-1]
    for episode, together, backwards in zip(sampled, batch, reversed_batch, strict=True):
        for value, how in ((call_reward(reward, [episode])[0], "alone"), (backwards, "in the batch reversed")):
            if not math.isclose(value, together, rel_tol=TOLERANCE, abs_tol=TOLERANCE):
                raise LmgymError(f"reward '{name}' gives {episode.text!r} {together} in a batch but {value} {how}")
