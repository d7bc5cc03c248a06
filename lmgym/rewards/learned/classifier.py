"""`learned_reward`: a classifier's output for one label. `reward_model`: a reward model's score of an answer.
`intent_accuracy`: has an answer in a dialogue the intent of its reference (DailyDialog)?"""

from collections.abc import Sequence
from typing import Any, Literal

from lmgym.core.errors import LmgymError
from lmgym.core.registry import register, suggest
from lmgym.rewards.learned import batched_forward
from lmgym.rewards.learned.rows import Row, chat_ids, clean, fitted, text_rows
from lmgym.rewards.learned.scorers import Scorer, by_model, load_scorer
from lmgym.rewards.text.meteor import meteor, meteor_stem
from lmgym.text.chat import answer_ids, messages_of, plain_text, prompt_ids
from lmgym.types import Example

Layout = Literal["auto", "answer", "chat", "pair", "joined"]
INTENTS = {1: "inform", 2: "question", 3: "directive", 4: "commissive"}
Context = Literal["last", "none", "all"]


@register("reward", "learned_reward")
@by_model("classifier")
def learned_reward(
    texts: list[str],
    examples: list[Example],
    scorer: Scorer,
    *,
    label: int | str,
    with_prompt: bool = False,
    output: Literal["probability", "logit"] = "probability",
) -> list[float]:
    """A sequence classifier's output for one label, given by its name or its index from 0: the softmax probability
    (sigmoid, for a multi-label model), or the logit.

    With `with_prompt` the classifier reads the prompt followed by the answer, with nothing between them. Source:
    RL4LMs, learned_reward, which takes label 1 of a sentiment model for IMDB.

    Raises LmgymError for a model that is missing or has no trained head, for an unknown label, and, with `truncation`
    refuse, for a text that is too long.

    Example: learned_reward(["What a film!"], [example], model="lvwerra/distilbert-imdb", label="POSITIVE") -> [0.98]"""
    index = _label_index(scorer, label)
    if with_prompt:
        texts = [plain_text(example.prompt) + text for text, example in zip(texts, examples, strict=True)]
    logits = batched_forward.logits(scorer, text_rows(scorer, texts))
    return [row[index] if output == "logit" else probabilities(scorer, row)[index] for row in logits]


@register("reward", "reward_model")
@by_model("classifier")
def reward_model(texts: list[str], examples: list[Example], scorer: Scorer, *, layout: Layout = "auto") -> list[float]:
    """A reward model's score of an answer to its prompt: the single output of a sequence classifier, not rescaled.
    `model` may be the run folder of lmgym's algorithm reward_model.

    `layout` says how prompt and answer become the model's input. "answer" is the prompt as a policy reads it, then the
    answer and the end of sequence; "chat" renders both with the tokenizer's chat template; "pair" passes them as the
    two texts of an encoder's sentence pair; "joined" appends the answer to the prompt. "auto" is "answer" for models
    that lmgym has trained, else the first of the others that the tokenizer supports. With "answer" and "chat",
    `truncation` cuts the answer, never the prompt.

    Raises LmgymError as `learned_reward` does, and for a model with more than one output.

    Example: reward_model(["4"], [Example("a/0", "2+2?")], model="Skywork/Skywork-Reward-V2-Qwen3-0.6B") -> [7.3]"""
    check_scalar(scorer)
    layout = _layout(scorer) if layout == "auto" else layout
    if layout == "chat" and not getattr(scorer.tokenizer, "chat_template", None):
        raise LmgymError(f"key 'rewards.reward_model.layout': {scorer.name} has no chat template; write pair or joined")
    if layout in ("answer", "chat"):
        row = _answer if layout == "answer" else _chat
        rows = [row(scorer, text, example) for text, example in zip(texts, examples, strict=True)]
    elif layout == "pair":
        rows = text_rows(scorer, [plain_text(example.prompt) for example in examples], second=texts)
    else:
        both = [plain_text(example.prompt) + text for text, example in zip(texts, examples, strict=True)]
        rows = text_rows(scorer, both)
    return [row[0] for row in batched_forward.logits(scorer, rows)]


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
    right = [_intent_index(scorer, intent) for intent in _intents_of(examples)]
    inputs = [_before(example, context, end_of_utterance) + text for text, example in zip(texts, examples, strict=True)]
    predicted = [row.index(max(row)) for row in batched_forward.logits(scorer, text_rows(scorer, inputs))]
    values = [intent_coeff * float(one == other) for one, other in zip(predicted, right, strict=True)]
    if auto_coeff:
        meteors = (meteor if synonyms else meteor_stem)(texts, examples)
        values = [value + auto_coeff * score for value, score in zip(values, meteors, strict=True)]
    return values


def _check_intents(examples: Sequence[Example], **arguments: Any) -> None:
    """Check that the model can be loaded and knows the intents of all examples, and that METEOR can run."""
    intent_accuracy([""] * len(examples[:1]), list(examples[:1]), **arguments)
    settings = {key: arguments[key] for key in ("revision", "device", "compute") if key in arguments}
    scorer = load_scorer("intent_accuracy", "classifier", arguments["model"], **settings)
    for intent in set(_intents_of(examples)):
        _intent_index(scorer, intent)
    if arguments.get("auto_coeff", 1.0):
        similar = meteor if arguments.get("synonyms", True) else meteor_stem
        similar.check(examples)  # type: ignore[attr-defined]


intent_accuracy.check = _check_intents  # type: ignore[attr-defined]  # see base.check_examples


def _intents_of(examples: Sequence[Example]) -> list[int]:
    for example in examples:
        if example.meta.get("intent") not in INTENTS:
            raise LmgymError(
                f"reward 'intent_accuracy' needs meta['intent'], a number from 1 to 4, and that of example "
                f"'{example.id}' is {example.meta.get('intent')!r}"
            )
    return [int(example.meta["intent"]) for example in examples]


def _intent_index(scorer: Scorer, intent: int) -> int:
    """The index of an intent among the classifier's labels."""
    labels = [label.lower() for label in scorer.labels]
    for name in (str(intent), INTENTS[intent]):
        if name in labels:
            return labels.index(name)
    if len(labels) != len(INTENTS) or {*labels} & {*map(str, INTENTS), *INTENTS.values()}:
        raise LmgymError(
            f"key 'rewards.intent_accuracy.model': {scorer.name} has no label '{intent}' or '{INTENTS[intent]}'; its "
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


def _label_index(scorer: Scorer, label: int | str) -> int:
    """The index of a label among a classifier's outputs. Raises LmgymError if it has no such label."""
    labels = scorer.labels
    if len(labels) < 2:
        raise LmgymError(
            f"key 'rewards.learned_reward.model': {scorer.name} has one output and no labels to choose from; take "
            "the reward 'reward_model' for it"
        )
    where = f"key 'rewards.learned_reward.label': {scorer.name} has"
    if isinstance(label, int):
        if not 0 <= label < len(labels):
            raise LmgymError(f"{where} labels 0 to {len(labels) - 1}, not {label}")
        return label
    if label not in labels:
        raise LmgymError(f"{where} no label '{label}'; {suggest(label, labels)}")
    return labels.index(label)


def check_scalar(scorer: Scorer) -> None:
    """Raise LmgymError unless a classifier has one output."""
    if len(scorer.labels) != 1:
        raise LmgymError(
            f"key 'rewards.{scorer.reward}.model': {scorer.name} has {len(scorer.labels)} outputs "
            f"({', '.join(scorer.labels[:5])}), and '{scorer.reward}' needs one; 'learned_reward' reads one of several"
        )


def probabilities(scorer: Scorer, logits: Sequence[float]) -> list[float]:
    """A classifier's logits as probabilities: softmax, or sigmoid for a multi-label model."""
    import torch

    values = torch.tensor(logits, dtype=torch.float64)
    independent = scorer.model.config.problem_type == "multi_label_classification"
    return (values.sigmoid() if independent else values.softmax(-1)).tolist()


def _layout(scorer: Scorer) -> Layout:
    """The layout that "auto" takes: that of its training if it says so; a pair needs a tokenizer that puts a separator
    between two texts."""
    tokenizer = scorer.tokenizer
    if scorer.facts.get("layout") == "answer":
        return "answer"
    if getattr(tokenizer, "chat_template", None):
        return "chat"
    separates = tokenizer.num_special_tokens_to_add(pair=True) > tokenizer.num_special_tokens_to_add(pair=False)
    return "pair" if separates else "joined"


def _answer(scorer: Scorer, text: str, example: Example) -> Row:
    template = scorer.facts.get("template")
    before = prompt_ids(scorer.tokenizer, example.prompt, template)

    def rendered(answer: str) -> list[int]:
        return [*before, *answer_ids(scorer.tokenizer, example.prompt, answer, template)]

    return fitted(scorer, clean(text), rendered)


def _chat(scorer: Scorer, text: str, example: Example) -> Row:
    def rendered(answer: str) -> list[int]:
        messages = [*messages_of(example.prompt), {"role": "assistant", "content": answer}]
        return chat_ids(scorer, messages, generate=False)

    return fitted(scorer, text, rendered)
