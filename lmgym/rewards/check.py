"""`check_reward` tests the contract of a reward, for users who write their own; `why_never_paid` looks for the mistake
in one that never pays."""

import inspect
import math
import sys
from collections.abc import Callable, Sequence
from typing import Any

from lmgym.core.errors import LmgymError, describe
from lmgym.processes.pool import Failure
from lmgym.rewards.base import Judgement, Reward, as_read, call_reward, check_examples, episodes_to_judge, guard_reward
from lmgym.rewards.building import build_rewards
from lmgym.rewards.foreign.trl import is_chat
from lmgym.rewards.running.pooled import fresh_worker
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

    Held: one finite number per text (None: it cannot judge it), the empty text included, and the same number whether a
    text is scored alone, in a batch, or in the batch reversed (up to TOLERANCE); and the reward can work with the
    examples.
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
    with fresh_worker():
        batch = call_reward(reward, sampled)
        reversed_batch = call_reward(reward, sampled[::-1])[::-1]
        for episode, together, backwards in zip(sampled, batch, reversed_batch, strict=True):
            for value, how in ((call_reward(reward, [episode])[0], "alone"), (backwards, "in the batch reversed")):
                if isinstance(together, Failure):
                    raise LmgymError(f"reward '{name}' failed for {episode.text!r}: {together.message}")
                if not _same(value, together):
                    raise LmgymError(f"reward '{name}' gives {episode.text!r} {together} in a batch but {value} {how}")


def _same(one: Judgement, other: Judgement) -> bool:
    """Whether two judgements of a text are equal, up to TOLERANCE."""
    if isinstance(one, float) and isinstance(other, float):
        return math.isclose(one, other, rel_tol=TOLERANCE, abs_tol=TOLERANCE)
    return one == other


def why_never_paid(reward: Reward, episodes: Sequence[Episode], timeout: float = 60.0, tokenizer: Any = None) -> str:
    """What is wrong with a reward that was 0 for all of these episodes, as far as can be told: its function has caught
    an error of a wrong type, or pays where it gets texts in place of messages. Empty if nothing was found, and
    for lmgym's own rewards. Calls the function again, in this process.

    Example: why_never_paid(reward, episodes) ->
        'the function has caught TypeError: can only concatenate str (not "list") to str (rewards.py, line 7)'"""
    shown, function = as_read(reward, episodes_to_judge(reward, episodes), tokenizer), reward.function
    home = getattr(function, "__module__", None) or ""
    if not shown or reward.by_token or (home.startswith("lmgym.") and not home.startswith("lmgym.rewards.foreign.")):
        return ""
    try:
        with guard_reward(reward, len(shown), timeout):
            if caught := _caught(lambda: function(*reward.arguments(shown))):
                return f"the function has caught {caught}"
            other = getattr(function, "other_kind", None)
            paid = other is not None and any(other(shown, **getattr(function, "keywords", {})))
    except LmgymError:
        return ""
    kind = "texts" if is_chat(shown[0]) else "messages"
    kind = "the prompt too" if hasattr(function, "reads_sequence") else kind
    return f"it pays some of them if it gets {kind}: {KINDS[kind]}" if paid else ""


KINDS = {
    "messages": "task.prompts: chat makes messages of texts",
    "the prompt too": "write style: verl_sequence, as verl 0.1 called it",
    "texts": "completions are lists of messages here, since prompts are; read completion[0]['content']",
}


def _caught(call: Callable[[], Any]) -> str:
    """The first error of a wrong type that a call has raised and caught, with its line; empty if there is none. Those
    of libraries are not looked at, nor a search that has found nothing."""
    found: list[str] = []

    def watch(frame: Any, event: str, argument: Any) -> Any:
        if event == "exception" and issubclass(argument[0], TypeError | AttributeError):
            error, file = argument[1], frame.f_code.co_filename
            if "NoneType" not in str(error):
                told = describe(error if isinstance(error, BaseException) else argument[0](error))
                found.append(f"{told} ({file.rsplit('/', 1)[-1]}, line {frame.f_lineno})")
        return watch

    def enter(frame: Any, event: str, argument: Any) -> Any:
        file = frame.f_code.co_filename
        return None if "site-packages" in file or file.startswith((sys.prefix, sys.base_prefix, LMGYM)) else watch

    before = sys.gettrace()
    sys.settrace(enter)
    try:
        call()
    finally:
        sys.settrace(before)
    return found[0] if found else ""


LMGYM = inspect.getfile(LmgymError).rsplit("/core/", 1)[0]
