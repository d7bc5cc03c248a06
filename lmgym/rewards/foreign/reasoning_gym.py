"""reasoning-gym: `score_answer(answer, entry) -> number`, called once for each answer; its answers and entries."""

import re
from collections.abc import Callable
from typing import Any

from lmgym.core.errors import LmgymError
from lmgym.processes.coroutines import results_of
from lmgym.rewards.foreign.signature import EpisodeReward, Foreign
from lmgym.types import Episode, Example

TAGGED = re.compile(r"<answer>(.*?)</answer>", re.DOTALL)


def from_reasoning_gym(function: Callable[..., Any], name: str = "") -> EpisodeReward:
    """Turn a function written as reasoning-gym's `score_answer(answer, entry) -> number` into an lmgym reward of
    episodes.

    `answer` is the content of the last <answer>...</answer>; without such tags the whole text. `entry` is the library's
    record of the puzzle (`meta["entry"]`); of another task it is {"question", "answer", "metadata"}, made of prompt,
    first reference and `meta`.

    Raises LmgymError for the library's own methods: some of them let Python evaluate the answer.

    Source: reasoning-gym 0.1.25, ProceduralDataset.score_answer.

    Example: from_reasoning_gym(lambda answer, entry: float(answer == entry["answer"]))(episodes) -> [1.0, 0.0]"""
    foreign = Foreign(function, name or getattr(function, "__name__", "reward"), "reasoning-gym", ("answer", "entry"))
    home = type(getattr(function, "__self__", None)).__module__
    if home.split(".")[0] == "reasoning_gym":
        raise LmgymError(
            f"reward '{foreign.called}' is a method of reasoning-gym, and some of these evaluate the model's text as "
            "Python; take the reward 'reasoning_gym', which scores by them and evaluates arithmetic only"
        )

    def reward(episodes: list[Episode], **arguments: Any) -> list[float]:
        tagged = [(episode.text, last_tagged(episode.text)) for episode in episodes]
        answers = [text.strip() if own is None else own for text, own in tagged]
        entries = [entry_of(episode.example) for episode in episodes]
        return results_of([function(*both, **arguments) for both in zip(answers, entries, strict=True)])

    return foreign.finished(reward, ())  # type: ignore[no-any-return]


def last_tagged(text: str) -> str | None:
    """The content of a text's last <answer>...</answer>, without the white space around it; None without such tags.

    Example: last_tagged("so <answer> 2 </answer>") -> "2" """
    closed = text[: text.rfind("</answer>") + len("</answer>")]  # a tag behind it has no end to be searched for
    found = TAGGED.findall(closed)
    return found[-1].strip() if found else None


def entry_of(example: Example) -> dict[str, Any]:
    """The library's record of an example; of another task's example, one with the same keys."""
    if "entry" in example.meta and "dataset" in example.meta:
        return dict(restored(example.meta["entry"]))
    answer = example.references[0] if example.references else example.meta.get("answer")
    return {"question": example.prompt, "answer": answer, "metadata": dict(example.meta)}


def restored(value: Any) -> Any:
    """The entry with its tuples, which JSON cannot hold: tasks/reasoning_gym.py writes them as {"tuple": [...]}."""
    if isinstance(value, list):
        return [restored(item) for item in value]
    if isinstance(value, dict):
        if set(value) == {"tuple"}:
            return tuple(restored(item) for item in value["tuple"])
        return {key: restored(item) for key, item in value.items()}
    return value
