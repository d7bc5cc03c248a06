"""The data types of tasks, rollouts and rewards, without torch.

Tasks make Examples, rollouts make Episodes of Turns, rewards score them, and `batch.collate` makes tensors of them."""

import base64
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from itertools import pairwise
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

Message = Mapping[str, str]  # {"role": "system" | "user" | "assistant", "content": "..."}
Prompt = str | Sequence[Message]
PICTURE = (
    "\ufffc"  # the object replacement character, which Unicode has for this: something that is no text stands here
)


class RecipeText(str):
    """A text of which the recipe wrote all or parts (system_prompt, prompt_prefix, prompt_suffix), or in which pictures
    stand. Only the recipe's parts may spell control tokens: in all other text "<|im_end|>" is ten characters
    (text/control.py). And only what is named here is a picture: in any other text "\ufffc" is a character.

    `spans` holds the (begin, end) of the recipe's parts, `pictures` the (place, digest) of each picture: a character
    PICTURE, and the name of its file (pictures/store.py). Every operation of `str`, such as +, gives a plain text
    without them.

    Example: RecipeText.join(RecipeText("<|user|>"), "2+2=").spans -> ((0, 8),)"""

    spans: tuple[tuple[int, int], ...]
    pictures: tuple[tuple[int, str], ...]

    def __new__(
        cls, text: str, spans: Sequence[Sequence[int]] | None = None, pictures: Sequence[tuple[int, str]] = ()
    ) -> "RecipeText":
        made = super().__new__(cls, text)
        made.spans = ((0, len(text)),) if spans is None else tuple((begin, end) for begin, end in spans)
        made.pictures = tuple((place, digest) for place, digest in pictures if text[place : place + 1] == PICTURE)
        return made

    @classmethod
    def join(cls, *texts: str) -> str:  # type: ignore[override]  # of str's own join nothing is used here
        """The texts one after the other; a RecipeText if one of them is."""
        spans, pictures, length = list[tuple[int, int]](), list[tuple[int, str]](), 0
        for text in texts:
            spans += [(length + begin, length + end) for begin, end in getattr(text, "spans", ()) if begin < end]
            pictures += [(length + place, digest) for place, digest in pictures_of(text)]
            length += len(text)
        whole = "".join(texts)
        return cls(whole, spans, pictures) if spans or pictures else whole


def picture_text(digest: str) -> RecipeText:
    """A text that is one picture. Example: RecipeText.join(picture_text(digest), "How many?") -> '\ufffcHow many?'"""
    return RecipeText(PICTURE, (), [(0, digest)])


def pictures_of(text: str) -> tuple[tuple[int, str], ...]:
    """The pictures in a text, each with its place and its digest; a plain text has none."""
    return getattr(text, "pictures", ())


def part_of(text: str, begin: int, end: int) -> str:
    """The characters from `begin` to before `end`, with the recipe's parts and the pictures among them.

    Example: part_of(RecipeText.join("a", picture_text(digest), "b"), 1, 3).pictures -> ((0, digest),)"""
    spans = [(max(first, begin) - begin, min(last, end) - begin) for first, last in getattr(text, "spans", ())]
    spans = [span for span in spans if span[0] < span[1]]
    pictures = [(place - begin, digest) for place, digest in pictures_of(text) if begin <= place < end]
    return RecipeText(text[begin:end], spans, pictures) if spans or pictures else text[begin:end]


def around_pictures(text: str) -> list[str]:
    """Split a text at its pictures: text, picture, text, picture, ..., text. Each picture is a `picture_text`; a text
    may be empty. A text without pictures is the only item.

    Example: around_pictures(RecipeText.join("a", picture_text(digest), "b")) -> ['a', '\ufffc', 'b']"""
    edges = [0, *(edge for place, _ in pictures_of(text) for edge in (place, place + 1)), len(text)]
    return [part_of(text, begin, end) for begin, end in pairwise(edges)] if len(edges) > 2 else [text]


def told_apart(prompt: Prompt) -> str:
    """A text that differs for prompts that differ: their words, and behind them the pictures that stand there.

    Example: told_apart("2+2=") -> '2+2='"""
    texts = [prompt] if isinstance(prompt, str) else [message.get("content", "") for message in prompt]
    return " ".join([str(prompt), *(digest for text in texts for _, digest in pictures_of(text))])


class BarePrompt(RecipeText):
    """A prompt that reaches the model without its chat template (`task.prompts`).

    As "text" it is tokenized like any text. As "rendered" a template has written it before: all of it may spell control
    tokens, and the tokenizer adds none. Every operation of `str` gives a plain text.

    Example: BarePrompt("<|im_start|>user\n2+2=<|im_end|>\n<|im_start|>assistant\n", form="rendered")"""

    form: Literal["text", "rendered"]

    def __new__(
        cls,
        text: str,
        spans: Sequence[Sequence[int]] | None = (),
        form: Literal["text", "rendered"] = "text",
        pictures: Sequence[tuple[int, str]] = (),
    ) -> "BarePrompt":
        made = super().__new__(cls, text, None if form == "rendered" else spans, pictures)
        made.form = form  # type: ignore[attr-defined]
        return made  # type: ignore[return-value]


def recipe_spans(prompt: Prompt) -> list[list[Any]]:
    """The recipe's parts of a prompt, and its pictures, as JSON can hold them: [message, begin, end] or
    [message, place, digest] for each; first [form] of a prompt without template.

    Example: recipe_spans([{"role": "system", "content": RecipeText("Add.")}, {"role": "user", "content": "1+1="}])
    -> [[0, 0, 4]]"""
    texts = [prompt] if isinstance(prompt, str) else [message.get("content", "") for message in prompt]
    spans = [
        [index, *one] for index, text in enumerate(texts) for one in (*getattr(text, "spans", ()), *pictures_of(text))
    ]
    return [[prompt.form], *spans] if isinstance(prompt, BarePrompt) else spans


def with_recipe_spans(prompt: Any, spans: Sequence[Sequence[Any]]) -> Any:
    """The prompt with the parts and the pictures that `recipe_spans` has found in it."""

    def parted(text: str, own: Sequence[Sequence[Any]]) -> RecipeText:
        places = [(one[1], one[2]) for one in own if isinstance(one[2], str)]
        return RecipeText(text, [one[1:] for one in own if not isinstance(one[2], str)], places)

    if isinstance(prompt, str) and spans and len(spans[0]) == 1:
        text = parted(prompt, spans[1:])
        return BarePrompt(text, text.spans, spans[0][0], text.pictures)
    if isinstance(prompt, str):
        return parted(prompt, spans) if spans else prompt
    messages = list(prompt)
    for index in {span[0] for span in spans}:
        of_message = [span for span in spans if span[0] == index]
        messages[index] = {**messages[index], "content": parted(messages[index]["content"], of_message)}
    return messages


@dataclass(frozen=True)
class RatedAnswer:
    """An answer that was judged before the training, by people or by a program. A larger rating is a better answer; an
    answer that is good or bad alone has 1 or 0. Example: RatedAnswer("Hello! How can I help?", rating=1.0)"""

    text: str
    rating: float


@dataclass(frozen=True)
class LabelledStep:
    """A step of an answer, and whether people or a program found it right. Example: LabelledStep("3 + 4 = 7", True)"""

    text: str
    right: bool


@dataclass(frozen=True)
class Example:
    """One problem of a task.

    `prompt` is a text or a list of chat messages. `references` are complete answers as a model should write them, for
    supervised training and for rewards that compare; open tasks have none. `rated` are answers with ratings, for
    training on preferences: a pair has two. `steps` is one answer in steps, each with a label, for training on steps.
    `meta` holds other data that a reward or a table of results needs.

    Example:
        >>> Example(id="gsm8k/train/0", prompt="Tom has 3 apples and buys 4. How many has he?",
        ...         references=("3 + 4 = 7\\n#### 7",), meta={"answer": "7"})
    """

    id: str
    prompt: Prompt
    references: tuple[str, ...] = ()
    meta: Mapping[str, Any] = field(default_factory=dict)
    rated: tuple[RatedAnswer, ...] = ()
    steps: tuple[LabelledStep, ...] = ()

    def to_json(self) -> dict[str, Any]:
        """The example as values that JSON can hold. Raises TypeError or ValueError where `meta` holds anything else."""
        prompt = self.prompt if isinstance(self.prompt, str) else [dict(message) for message in self.prompt]
        references, meta = list(self.references), dict(self.meta)
        tree: dict[str, Any] = {"id": self.id, "prompt": prompt, "references": references, "meta": meta}
        if self.rated:
            tree["rated"] = [[answer.text, answer.rating] for answer in self.rated]
        if self.steps:
            tree["steps"] = [[step.text, step.right] for step in self.steps]
        if spans := recipe_spans(self.prompt):
            tree["recipe_spans"] = spans
        json.dumps(tree)
        return tree

    @classmethod
    def from_json(cls, tree: Mapping[str, Any]) -> "Example":
        """The example that `to_json` has written."""
        known: dict[str, Any] = {
            "prompt": with_recipe_spans(tree["prompt"], tree.get("recipe_spans", ())),
            "references": tuple(tree["references"]),
            "rated": tuple(RatedAnswer(*answer) for answer in tree.get("rated", ())),
            "steps": tuple(LabelledStep(*step) for step in tree.get("steps", ())),
        }
        return cls(**{key: value for key, value in tree.items() if key != "recipe_spans"} | known)


@dataclass
class Turn:
    """The tokens that the policy was given, then the tokens that it sampled.

    `prompt_ids` are only the tokens appended since the previous turn (in the first turn, the whole prompt).
    `action_ids` are exactly the sampled tokens, with the end-of-sequence or stop token; `logprobs` are their
    log-probabilities under the distribution that was sampled (natural log, temperature applied; empty for
    demonstrations). The first `min_new_tokens` actions were drawn with the stop ids excluded.

    For an encoder-decoder, `source_ids` are the encoder's input (the whole conversation so far), `prompt_ids` are the
    decoder's first tokens, and each turn is a row of its own (`restart`). If sampling was truncated or restricted, row
    t of `kept` is the set of tokens that action t was drawn from, as bits or as ids (functional/truncation.py).

    Example: a turn of a model that was asked "2+2=" and answered "4", then stopped:
        >>> Turn(prompt_ids=[51, 44, 51, 62], action_ids=[53, 2], logprobs=[-0.1, -0.02], text="4", stop="eos",
        reward=1.0)
    """

    prompt_ids: list[int]
    action_ids: list[int]
    logprobs: list[float] = field(default_factory=list)
    text: str = ""  # the actions decoded, special tokens removed
    stop: str = "eos"  # or "stop" (a stop string or id), "length" (max_new_tokens), "context" (context length)
    min_new_tokens: int = 0
    reward: float = 0.0  # earned by this turn
    restart: bool = False  # the prompt was rewritten, not appended to: this turn begins a new row
    source_ids: list[int] = field(default_factory=list)
    kept: npt.NDArray[np.uint8] | npt.NDArray[np.int32] | None = None  # [actions, width]
    continuation: str | None = None  # text that the environment added, if the policy then goes on in the same message
    unfinished: bool = False  # the next turn continues this turn's action (`Step.unfinished`)
    given: str = ""  # how the message begins, by policy.answer_start; its ids are the last ones of `prompt_ids`
    token_rewards: list[float] | None = None  # part of `reward` that each action earned; the last one gets the rest
    versions: list[list[int]] = field(default_factory=list)  # [version of the weights, actions] of each part, if newer
    # weights went on with it (engine.chunk); else all of it is of the episode's version
    info: dict[str, str | float] = field(default_factory=dict)  # what the environment notes on it (`Step.info`)
    seconds: dict[str, float] = field(default_factory=dict, compare=False, repr=False)  # see logs/timings.py

    def to_json(self, seconds: bool = False) -> dict[str, Any]:
        """The turn as values that JSON can hold; of kept sets the shape and the bytes in base64. Without `seconds`,
        equal turns are equal trees."""
        tree = {f.name: getattr(self, f.name) for f in fields(self) if seconds or f.name != "seconds"}
        if self.kept is not None:
            tree["kept"] = [*self.kept.shape, base64.b64encode(self.kept.tobytes()).decode()]
        return tree

    @classmethod
    def from_json(cls, tree: Mapping[str, Any]) -> "Turn":
        """The turn that `to_json` has written; floats come back bit for bit."""
        if tree["kept"] is None:
            return cls(**tree)
        rows, width, text = tree["kept"]
        packed = base64.b64decode(text)
        form = np.uint8 if len(packed) == rows * width else np.int32  # functional/truncation.py
        return cls(**{**tree, "kept": np.frombuffer(packed, dtype=form).reshape(rows, width).copy()})


@dataclass
class Episode:
    """One complete interaction: one turn for a question, several for a conversation.

    `group` is the number of the prompt within the step; episodes of one group answer the same prompt. `index` is the
    number of the episode within the step; with (seed, step, draw) it determines the random numbers. `terminated` is
    True if the episode ended by itself and False if it was cut off (length, time, context). `error` is the reason if
    the environment failed; such an episode is not trained on, and may have no turns. A reward that could not judge the
    answer has None in `reward_components`, and what went wrong, if anything did, in `reward_errors`.

    Example:
        >>> Episode(example=Example("a/0", "2+2="), group=0, index=3, turns=[...], score=1.1,
        ...         reward_components={"final_answer": 1.0, "answer_format": 1.0})     # weights 1 and 0.1
    """

    example: Example
    group: int
    index: int
    turns: list[Turn] = field(default_factory=list)
    terminated: bool = True
    version: int = 0  # of the weights that sampled it, or began to: the number of updates before
    reward_components: dict[str, float | None] = field(default_factory=dict)  # each reward before its weight
    score: float = 0.0  # the sum of the turns' rewards
    judged: bool = True  # False: no reward could judge it, so its score means nothing, and it is not trained on
    reward_errors: dict[str, str] = field(default_factory=dict)  # by reward: what it raised, or that it was too slow
    selected: bool = True  # False: the algorithm does not train on it
    messages: list[Message] = field(default_factory=list)  # the conversation with roles, its last answer included
    baseline: float | None = None  # score of the greedy answer to the same prompt, if the algorithm needs it
    error: str = ""
    chat: bool = False  # the conversation has begun with messages, whatever the example's prompt is
    by: Literal["", "rival", "data"] = ""  # who wrote it, if not the policy that trains (Requirements)
    reward_seconds: dict[str, float] = field(default_factory=dict, compare=False, repr=False)  # see logs/timings.py

    def to_json(self, seconds: bool = False) -> dict[str, Any]:
        """The episode as values that JSON can hold. Without `seconds`, equal episodes are equal trees, whatever a clock
        has said. Raises TypeError or ValueError as `Example.to_json` does."""
        tree = {f.name: getattr(self, f.name) for f in fields(self) if seconds or f.name != "reward_seconds"}
        tree |= {"example": self.example.to_json(), "turns": [turn.to_json(seconds) for turn in self.turns]}
        tree["messages"] = [dict(message) for message in self.messages]
        spans = recipe_spans(self.messages)
        return tree | {"recipe_spans": spans} if spans else tree

    @classmethod
    def from_json(cls, tree: Mapping[str, Any]) -> "Episode":
        """The episode that `to_json` has written; floats come back bit for bit."""
        known: dict[str, Any] = {
            "example": Example.from_json(tree["example"]),
            "turns": [Turn.from_json(turn) for turn in tree["turns"]],
            "messages": with_recipe_spans(tree["messages"], tree.get("recipe_spans", ())),
        }
        return cls(**{key: value for key, value in tree.items() if key != "recipe_spans"} | known)

    @property
    def text(self) -> str:
        """The model's last message: its last turn, after earlier turns that belong to the same message, and after the
        beginning that it was given."""
        text = self.turns[-1].given + self.turns[-1].text if self.turns else ""
        for turn in reversed(self.turns[:-1]):
            if turn.continuation is None:
                break
            text = turn.given + turn.text + turn.continuation + text
        return text

    @property
    def truncated(self) -> bool:
        """True if any action was cut off by the token limit or the end of the context."""
        return any(turn.stop in ("length", "context") for turn in self.turns)

    @property
    def overflowed(self) -> bool:
        """True if the model's context was full, in the middle of an action or before the next one."""
        return any(turn.stop == "context" for turn in self.turns)

    def rows(self) -> list[list[Turn]]:
        """The turns of each token sequence; there is more than one row only if a prompt was rewritten."""
        rows: list[list[Turn]] = []
        for turn in self.turns:
            if turn.restart or not rows:
                rows.append([])
            rows[-1].append(turn)
        return rows


@dataclass(frozen=True)
class Restriction:
    """Only tokens that are likely under a mask policy, or under the sampled policy itself, may be sampled.

    The set of allowed tokens is stored for each sampled token (`Completion.kept`), and log-probabilities are
    renormalised on it later. It always contains the policy's special ids.

    Example: Restriction(rule="top_p", amount=0.9, least=1)"""

    rule: Literal["top_p", "top_k"]
    amount: float  # top_p: probability mass; top_k: number of tokens
    least: int = 1  # smallest number of tokens in a set
