"""`intent_accuracy`: has an answer in a dialogue the intent of its reference (DailyDialog: inform, question, directive,
commissive)?"""

from collections.abc import Sequence
from typing import Any, Literal

from lmgym.core.errors import LmgymError
from lmgym.core.registry import register
from lmgym.rewards.learned import batched_forward
from lmgym.rewards.learned.rows import text_rows
from lmgym.rewards.learned.scorers import Scorer, by_model, load_scorer
from lmgym.rewards.text.meteor import meteor, meteor_stem
from lmgym.text.chat import plain_text
from lmgym.types import Example

NAMES = {1: "inform", 2: "question", 3: "directive", 4: "commissive"}
Context = Literal["last", "none", "all"]


@register("reward", "intent_accuracy")
@by_model("classifier")
def intent_accuracy(
    texts: list[str],
    examples: list[Example],
    scorer: Scorer,
    *,
    intent_coeff: float = 1.0,
    auto_coeff: float = 1.0,
    context: Context = "last",
    end_of_utterance: str = "<EOU>",
    synonyms: bool = True,
) -> list[float]:
    """intent_coeff * [the classifier's intent of the answer is the right one] + auto_coeff * METEOR of the answer.

    The right intent is the example's `meta["intent"]` (1 inform, 2 question, 3 directive, 4 commissive). The classifier
    must have a label with this number or name; if it has four labels and none of these, its labels are taken in this
    order. It reads the last utterance of the prompt, `end_of_utterance` and the answer; with `context` none the answer
    only, with all the whole prompt and the answer. Without `synonyms`, METEOR is meteor_stem. With auto_coeff 0 METEOR
    is not computed (RL4LMs' metric of this name).

    Source: RL4LMs. Two differences: its reward computes METEOR over all answers so far, here over each answer; and its
    classifier reads the two utterances without the mark between them, with which it was trained.

    Raises LmgymError for an example without an intent, for one without references if auto_coeff is not 0, for a
    classifier that does not know the intents, and as `learned_reward` does.

    Example: intent_accuracy(["Shall we?"], [example], model="models/intent", auto_coeff=0)  # a question was wanted
    -> [1.0]"""
    right = [_label(scorer, intent) for intent in _intents(examples)]
    inputs = [_before(example, context, end_of_utterance) + text for text, example in zip(texts, examples, strict=True)]
    predicted = [row.index(max(row)) for row in batched_forward.logits(scorer, text_rows(scorer, inputs))]
    values = [intent_coeff * float(one == other) for one, other in zip(predicted, right, strict=True)]
    if auto_coeff:
        meteors = (meteor if synonyms else meteor_stem)(texts, examples)
        values = [value + auto_coeff * score for value, score in zip(values, meteors, strict=True)]
    return values


def _check(examples: Sequence[Example], **arguments: Any) -> None:
    """Check that the model can be loaded and knows the intents of all examples, and that METEOR can run."""
    intent_accuracy([""] * len(examples[:1]), list(examples[:1]), **arguments)
    settings = {key: arguments[key] for key in ("revision", "device", "compute") if key in arguments}
    scorer = load_scorer("intent_accuracy", "classifier", arguments["model"], **settings)
    for intent in set(_intents(examples)):
        _label(scorer, intent)
    if arguments.get("auto_coeff", 1.0):
        similar = meteor if arguments.get("synonyms", True) else meteor_stem
        similar.check(examples)  # type: ignore[attr-defined]


intent_accuracy.check = _check  # type: ignore[attr-defined]  # see base.check_examples


def _intents(examples: Sequence[Example]) -> list[int]:
    for example in examples:
        if example.meta.get("intent") not in NAMES:
            raise LmgymError(
                f"reward 'intent_accuracy' needs meta['intent'], a number from 1 to 4, and that of example "
                f"'{example.id}' is {example.meta.get('intent')!r}"
            )
    return [int(example.meta["intent"]) for example in examples]


def _label(scorer: Scorer, intent: int) -> int:
    """The index of an intent among the classifier's labels."""
    labels = [label.lower() for label in scorer.labels]
    for name in (str(intent), NAMES[intent]):
        if name in labels:
            return labels.index(name)
    if len(labels) != len(NAMES) or {*labels} & {*map(str, NAMES), *NAMES.values()}:
        raise LmgymError(
            f"key 'rewards.intent_accuracy.model': {scorer.name} has no label '{intent}' or '{NAMES[intent]}'; its "
            f"labels are {', '.join(scorer.labels[:8])}"
        )
    return intent - 1


def _before(example: Example, context: Context, end: str) -> str:
    """The text that the classifier reads before the answer."""
    prompt = plain_text(example.prompt)
    if context != "last":
        return prompt if context == "all" else ""
    utterances = [utterance.strip() for utterance in prompt.split(end) if utterance.strip()]
    return f"{utterances[-1]} {end}" if utterances else ""
