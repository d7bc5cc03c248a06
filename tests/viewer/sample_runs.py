"""Small run folders for the tests of the viewer, written without training: every number in them is made up."""

import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from lmgym.logs.traces.files import shard_name
from lmgym.logs.traces.texts import TraceTexts
from lmgym.logs.traces.trace import TraceEpisode, TraceRow, TraceStep, TraceTurn, row_of_turns, write_shard
from lmgym.types import Turn

SPECIAL = ["<eos>", "<|im_start|>"]
HOSTILE = (
    "<script>document.title='hacked'</script><img src=x onerror=\"document.title='hacked'\"> "
    "\u202egnp.exe\u202c \x1b[2J\x07 <|im_start|>system &lt;b&gt; ../../etc/passwd $\\frac{1}{2}$ é🙂"
)
FORMULAS = (
    "It costs $5 and $6. Let $x^2 = 2$, then \\(\\sqrt[3]{x_1}\\) and\n$$\\frac{a}{b}$$\n\\[\\sum_{k=1}^n k\\]"
    "\n$\\unheardof{x}$ and `$y^2$` stay. It is \\boxed{\\frac12}."
)
ANSWERS = ("<think>20 and 22\nmake 42</think>The answer is 42.", "41", "42", "<tool_call>add(20, 22)</tool_call>", "42")
FIELDS = {"surrogate": {"name": "clip", "low": 0.2, "high": 0.28}, "credit": {"name": "group"}}
MADE_BY = {
    "algorithm": "grpo",
    "fields": FIELDS,
    "formulas": {"policy": "-min(r A, clip(r, 1 - low, 1 + high) A)", "A": "R less the mean of the group's scores"},
}


def byte_tokenizer() -> Tokenizer:
    """Ids 0 and 1 are control tokens, the others bytes."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {**{name: id for id, name in enumerate(SPECIAL)}, **{one: id for id, one in enumerate(alphabet, 2)}}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(SPECIAL)
    return tokenizer


def ids_of(tokenizer: Tokenizer, text: str) -> list[int]:
    """Ids of a text, none of them a control token."""
    pieces = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False).pre_tokenize_str(text)
    return [tokenizer.token_to_id(one) for piece, _ in pieces for one in piece]


def sample_run(folder: Path, steps: int = 12, groups: int = 3, texts: Sequence[str] = ANSWERS, seed: int = 0) -> Path:
    """A run of one stage with traces of every answer, rollouts.jsonl, three evaluations and a tokenizer."""
    folder.mkdir(parents=True)
    tokenizer = byte_tokenizer()
    (folder / "tokenizer").mkdir()
    tokenizer.save(str(folder / "tokenizer" / "tokenizer.json"))
    stage = "{name: rl, algorithm: {name: grpo}, optimizer: {learning_rate: 0.001}}"
    (folder / "recipe.yaml").write_text(f"seed: {seed}\npolicy: {{model: made up}}\nstages: [{stage}]\n")
    for step in range(steps):
        add_step(folder, tokenizer, step, groups, texts, seed)
        if step % 4 == 0:
            add_evaluation(folder, step, seed)
    return folder


def add_step(
    folder: Path, tokenizer: Tokenizer, step: int, groups: int = 3, texts: Sequence[str] = ANSWERS, seed: int = 0
) -> None:
    """One more step: its traces, its record in metrics.jsonl, and its first group in rollouts.jsonl."""
    random = np.random.default_rng([seed, step])
    episodes = []
    for group in range(groups):
        scores = [1.0 if "42" in text and "41" not in text and group != 1 else 0.0 for text in texts]
        center = sum(scores) / len(scores)
        for place, text in enumerate(texts):
            index = group * len(texts) + place
            episodes.append(
                _episode(tokenizer, index, group, text, scores[place], scores[place] - center, random, step)
            )
    columns: dict[str, Any] = {name: [getattr(one, name) for one in episodes] for name in ("index", "group", "score")}
    columns |= {
        "example": [one.example["id"] for one in episodes],
        "reward_components": {"final_answer": columns["score"]},
        "length": [len(one.rows[0].actions) for one in episodes],
        "turns": [1] * len(episodes),
        "truncated": [one.turns[0].stop == "length" for one in episodes],
        "selected": [one.selected for one in episodes],
        "reason": ["" if one.selected else "its group was not chosen: all scores are equal" for one in episodes],
        "error": [""] * len(episodes),
        "version": [step] * len(episodes),
        "surprise": [float(abs(one.rows[0].columns["advantages"]).mean()) for one in episodes],
        "kept": [True] * len(episodes),
    }
    fields: dict[str, Any] = {"stage": 0, "stage_name": "rl", "step": step}
    write_shard(folder, TraceStep(**fields, **MADE_BY, episodes=columns), episodes)
    reward = 0.3 + 0.02 * step + random.normal(0, 0.03)
    metrics = {"reward": reward, "length/mean": 20 - step / 2, "entropy": 1 / (1 + step), "truncated": 0.1}
    append(folder / "metrics.jsonl", {"kind": "train", **fields, **metrics})
    for one in episodes[: len(texts)]:
        append(folder / "rollouts.jsonl", {"kind": "train", **fields, **_record(one)})


def _episode(
    tokenizer: Tokenizer, index: int, group: int, text: str, score: float, advantage: float, random: Any, step: int
) -> TraceEpisode:
    prompt = f"What is 20 + 22, asked for the {group + 1}. time?"
    given = [1, *ids_of(tokenizer, prompt + "\n")]
    said = [*ids_of(tokenizer, text), 0]
    logprobs = np.minimum(random.normal(-0.7, 0.6, len(said)), -0.001).astype(np.float32)
    columns = {
        "logprobs_sampler": logprobs,
        "advantages": np.full(len(said), advantage, np.float32),
        "logprobs": logprobs,
        "weight/policy": np.full(len(said), 1 / 500, np.float32),
        "loss/policy": np.full(len(said), -advantage, np.float32),
        "push/policy": np.full(len(said), advantage / 500, np.float32),
        "ratio/mean": np.ones(len(said), np.float32),
        "ratio/clipped": np.zeros(len(said), np.float32),
    }
    return TraceEpisode(
        index=index, group=group, score=score, reward_components={"final_answer": score}, baseline=None,
        terminated=True,
        example={"id": f"sums/{group}", "prompt": prompt, "references": ["42"], "meta": {}},
        messages=[{"role": "user", "content": prompt}, {"role": "assistant", "content": text}],
        error="", version=step, selected=group != 1,
        turns=[TraceTurn(text=text, reward=score, stop="length" if text == "41" else "eos")],
        rows=[TraceRow(
            tokens=np.array([*given, *said], np.int32),
            actions=np.arange(len(given), len(given) + len(said), dtype=np.int32),
            turn=np.zeros(len(said), np.int32), columns=columns,
        )],
    )  # fmt: skip


def _record(episode: TraceEpisode) -> dict[str, Any]:
    row = episode.rows[0]
    turn = {
        "prompt_ids": row.tokens[: row.actions[0]].tolist(), "action_ids": row.tokens[row.actions].tolist(),
        "logprobs": row.columns["logprobs_sampler"].tolist(), "text": episode.turns[0].text,
        "stop": episode.turns[0].stop, "min_new_tokens": 0, "reward": episode.score, "restart": False, "source_ids": [],
        "continuation": None, "unfinished": False, "token_rewards": None,
    }  # fmt: skip
    return {
        "example": episode.example["id"], "group": episode.group, "index": episode.index,
        "prompt": episode.example["prompt"], "references": ["42"], "turns": [turn],
        "reward_components": episode.reward_components, "score": episode.score, "version": episode.version,
    }  # fmt: skip


def add_evaluation(folder: Path, step: int, seed: int = 0) -> None:
    """An evaluation of two held-out prompts: its numbers, and an answer to each."""
    place = {"kind": "evaluation", "stage": 0, "stage_name": "rl", "step": step, "split": "validation"}
    mean = 0.2 + 0.05 * step / 4
    numbers = {"count": 2, "final_answer": mean, "final_answer/low": mean - 0.1, "final_answer/high": mean + 0.1}
    append(folder / "metrics.jsonl", place | numbers)
    tokenizer = byte_tokenizer()
    for index, text in enumerate((f"It is {40 + step} and no more.", f"Seed {seed} says 7.")):
        random = np.random.default_rng([seed, step, index])
        episode = _episode(tokenizer, index, index, text, float(index == 0 and step > 4), 0.0, random, step)
        append(folder / "rollouts.jsonl", place | _record(episode) | {"example": f"sums/validation/{index}"})


def append(path: Path, record: dict[str, Any]) -> None:
    with path.open("a", encoding="utf-8") as file:
        file.write(json.dumps(record) + "\n")


def worded_run(folder: Path) -> Path:
    """A run of one step of two groups of two answers, none kept whole: of the first group the words, of the second
    only numbers. Its main reward is never earned, a smaller one is."""
    sample_run(folder, steps=0)
    (folder / "recipe.yaml").write_text("stages:\n- name: rl\n  steps: 1\n  rewards: {final_answer: 1.0, form: 0.1}\n")
    columns: dict[str, Any] = {
        "index": [0, 1, 2, 3], "group": [0, 0, 1, 1], "example": ["sums/0", "sums/0", "sums/1", "sums/1"],
        "score": [0.1, 0.0, 0.1, 0.1], "length": [3] * 4, "turns": [1] * 4, "truncated": [False] * 4,
        "selected": [True] * 4, "reason": [""] * 4, "error": [""] * 4, "version": [0] * 4, "surprise": [0.5] * 4,
        "kept": [False] * 4, "reward_components": {"final_answer": [0.0] * 4, "form": [1.0, 0.0, 1.0, 1.0]},
    }  # fmt: skip
    prompt = [{"role": "system", "content": "a long instruction"}, {"role": "user", "content": "the last question"}]
    texts = TraceTexts(prompts={0: prompt}, answers={0: ["42 it is"], 1: ["41"]})
    write_shard(folder, TraceStep(stage=0, stage_name="rl", step=0, **MADE_BY, episodes=columns), [], texts)
    append(folder / "metrics.jsonl", {"kind": "train", "stage": 0, "stage_name": "rl", "step": 0, "reward": 0.1})
    return folder


def many_steps(folder: Path, steps: int, answers: int) -> Path:
    """A run of so many steps of so many answers each. All steps share one file, so that a million are quickly written:
    the step that it names is 0."""
    sample_run(folder, steps=1)
    index = list(range(answers))
    columns: dict[str, Any] = {
        "index": index, "group": [one // 8 for one in index], "example": [f"sums/{one // 8}" for one in index],
        "score": [float(one % 3 == 0) for one in index], "length": [one % 50 for one in index],
        "turns": [1] * answers, "truncated": [one % 50 == 49 for one in index], "selected": [True] * answers,
        "reason": [""] * answers, "error": [""] * answers, "version": [0] * answers, "surprise": [0.5] * answers,
        "kept": [False] * answers,
    }  # fmt: skip
    columns["reward_components"] = {"final_answer": columns["score"]}
    table = TraceStep(stage=0, stage_name="rl", step=1, **MADE_BY, episodes=columns)
    first = write_shard(folder, table, [])
    lines = []
    for step in range(1, steps):
        if step > 1:
            os.link(first, first.with_name(shard_name(0, step)))
        lines.append(
            json.dumps({"kind": "train", "stage": 0, "stage_name": "rl", "step": step, "reward": step / steps})
        )
    with (folder / "metrics.jsonl").open("a", encoding="utf-8") as file:
        file.write("\n".join(lines) + "\n")
    return folder


def session_run(folder: Path) -> Path:
    """A run of one step, whose only answer is the session of a program: six turns, three of which fork."""
    sample_run(folder, steps=0)
    tokenizer = byte_tokenizer()
    said = [  # what a turn has read since its parent, the parent, and what it says
        ("Add 20 and 22.", None, '<tool_call>{"name": "add", "arguments": {"a": 20, "b": 22}}</tool_call>'),
        ("42", 0, "It is 42."),
        ("Are you sure? Look again.", 1, "Yes: 20 and 22 make 42."),
        ("the tool failed", 0, "Then I count: 42."),
        ("Are you sure? Look again.", 1, "No."),
        ("Sum up in one word.", None, "Sums"),
    ]
    turns, whole = list[Turn](), list[list[int]]()
    for number, (asked, parent, answer) in enumerate(said):
        before = [] if parent is None else whole[parent]
        goes_on = parent is not None and parent == number - 1
        new, actions = [1, *ids_of(tokenizer, f"user\n{asked}\n"), 1], [*ids_of(tokenizer, answer), 0]
        turns.append(
            Turn([*([] if goes_on else before), *new], actions, [-0.5] * len(actions), answer, restart=not goes_on)
        )
        whole.append([*before, *new, *actions])
    turns[-1].reward = 1.0
    rows, first = list[TraceRow](), 0
    for number in range(1, len(turns) + 1):
        if number == len(turns) or turns[number].restart:
            rows.append(row_of_turns(turns[first:number], first))
            first = number
    for place, row in enumerate(rows):
        row.columns["advantages"] = np.linspace(1.0, -1.0, len(row.actions), dtype=np.float32) * (-1) ** place
    episode = TraceEpisode(
        index=0, group=0, score=1.0, reward_components={}, baseline=None, terminated=True, error="", version=0,
        example={"id": "sums/0", "prompt": "Add 20 and 22.", "references": [], "meta": {}}, messages=[], selected=True,
        turns=[TraceTurn(text=turn.text, reward=turn.reward, restart=turn.restart) for turn in turns], rows=rows,
    )  # fmt: skip
    columns: dict[str, Any] = {
        "index": [0], "group": [0], "example": ["sums/0"], "score": [1.0],
        "length": [sum(len(row.actions) for row in rows)],
        "turns": [len(turns)], "truncated": [False], "selected": [True], "reason": [""], "error": [""], "version": [0],
        "surprise": [0.5], "kept": [True], "reward_components": {},
    }  # fmt: skip
    place: dict[str, Any] = {"stage": 0, "stage_name": "rl", "step": 0}
    write_shard(folder, TraceStep(**place, **MADE_BY, episodes=columns), [episode])
    append(folder / "metrics.jsonl", {"kind": "train", **place, "reward": 1.0})
    return folder
