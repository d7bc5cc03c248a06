"""Rewards in the forms of other libraries, which test_foreign_rewards.py scores with: worker processes import this
file, and no torch."""

import asyncio
import os
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any


def trl_documented(completions, **kwargs):  # type: ignore[no-untyped-def]
    """Of TRL's documentation: rewards longer answers."""
    return [float(len(completion)) for completion in completions]


def trl_answer(completions: list[str], answer: list[str]) -> list[float | None]:
    return [None if right is None else float(right in text) for right, text in zip(answer, completions, strict=True)]


def trl_all(prompts, completions, completion_ids, level=None, **kwargs):  # type: ignore[no-untyped-def]
    """A number of everything that it is given."""
    given = {**kwargs, "prompts": prompts, "completions": completions, "level": level}
    names = sorted(key for key in given if not key.startswith("log_"))
    return [float(len(names) * 100 + len(prompts[n]) * 10 + ids[-1]) for n, ids in enumerate(completion_ids)]


def trl_reads_answer(completions: list[str], **columns: Any) -> list[float]:
    return [float(right in text) for right, text in zip(columns["answer"], completions, strict=True)]


def trl_strips(completions: list[str], **columns: Any) -> list[float]:
    return [float(len(completion.strip())) for completion in completions]


def trl_chat(completions: list[list[dict[str, str]]], **columns: Any) -> list[float]:
    return [float(len(completion[0]["content"])) for completion in completions]


async def trl_later(completions: list[str], **kwargs: Any) -> list[float]:
    await asyncio.sleep(0)
    return [float(len(text)) for text in completions]


def trl_state(completions: list[str], trainer_state: Any) -> list[float]:
    return [0.0 for _ in completions]


def trl_state_if_any(completions: list[str], trainer_state: Any = None) -> list[float]:
    return [1.0 if trainer_state is None else 0.0 for _ in completions]


def trl_logs(completions: list[str], log_metric: Any, **columns: Any) -> list[float]:
    log_metric("right", 0.5)
    columns["log_extra"]("text", completions)
    columns["log_extra"]("length", [len(text) for text in completions])
    return [1.0] * len(completions)


def vf_answer(completion, answer, **kwargs):  # type: ignore[no-untyped-def]
    return 1.0 if answer in completion[-1]["content"] else 0.0


async def vf_later(prompt: list[dict[str, str]], completion: list[dict[str, str]]) -> float:
    await asyncio.sleep(0)
    return float(len(prompt[-1]["content"]) + len(completion[0]["content"]))


def vf_state(state: dict[str, Any], info: dict[str, Any]) -> float:
    return len(state["completion"]) + info["level"] + 0.5 * state["is_truncated"]


def vf_parsed(parser: Any, completion: Any, answer: str) -> float:
    return float(parser.parse(completion) == answer)


def vf_group(states: list[Any], completions: list[Any]) -> list[float]:
    return [0.0 for _ in states]


def rg_score(answer: str | None, entry: dict[str, Any]) -> float:
    return float(answer == entry["answer"]) + 0.001 * len(entry["question"])


def nobody(a: list[str], b: list[Any]) -> list[float]:
    return [1.0 for _ in a]


def process(completions: list[str]) -> list[float]:
    return [float(os.getpid()) for _ in completions]


def raises(completion: str) -> float:
    raise ValueError("no")


rubric = SimpleNamespace(
    funcs=[vf_parsed, vf_later],
    weights=[1.0, 0.25],
    class_objects={"parser": SimpleNamespace(parse=lambda messages: messages[-1]["content"].strip())},
)


seen: list[Any] = []


def reward_func(queries, prompts, labels, **kwargs):  # type: ignore[no-untyped-def]
    seen.append((queries, prompts, labels))
    right = [float(query[len(prompt) :].startswith(f"#### {label}")) for query, prompt, label in rows(locals())]
    return {"rewards": [one - 0.5 for one in right], "scores": right, "extra_logs": {"mean": sum(right) / len(right)}}


def rows(lists: Any) -> Any:
    return zip(lists["queries"], lists["prompts"], lists["labels"], strict=True)


def get_scaled(scale: float, offset: float = 0.0) -> Callable[..., list[float]]:
    def scaled(completions, **kwargs):  # type: ignore[no-untyped-def]
        return [scale * len(text) + offset for text in completions]

    return scaled


class Scaled:
    def __init__(self, scale: float) -> None:
        self.scale = scale

    def __call__(self, completions: list[str], **kwargs: Any) -> list[float]:
        return [self.scale * len(text) for text in completions]
