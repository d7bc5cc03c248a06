"""Rewards of verl, OpenRLHF, TRL and open-r1 as they are: ten answers each give what the original gives."""

import json
import re
import threading
from http.server import BaseHTTPRequestHandler, HTTPServer
from typing import Any

import pytest

from lmgym.core.errors import LmgymError
from lmgym.rewards.adapters import style_of
from lmgym.rewards.base import call_reward, check_examples
from lmgym.rewards.building import build_rewards
from lmgym.rewards.check import why_never_paid
from lmgym.rewards.foreign.signature import written_of
from lmgym.rewards.views import with_text
from lmgym.rollouts.rollout import apply_rewards
from lmgym.types import Episode, Example, Turn
from tests.contract.foreign_rewards import reward_func, seen
from tests.property.test_rendering import chat, ids_of

HERE = "tests.contract.test_rewards_of_others"
LIGHT = "tests.contract.foreign_rewards"  # a worker imports it, so it imports no torch
ANSWERS = (
    "3 + 4 = 7\n#### 7",
    "#### 7.",
    "#### $7",
    "####  7",
    "the answer is 7",
    "#### 7 or #### 8",
    "#### -7",
    "#### 1,007",
    "",
    "Answer: 7",
)
USER = [{"role": "user", "content": "3+4?"}]


def answered(*texts: str, prompt: Any = "3+4?", **meta: Any) -> list[Episode]:
    """Answers with the ids that the model would have read and written."""
    asked = chat.apply_chat_template(USER, tokenize=False, add_generation_prompt=True)
    return [
        Episode(
            Example(f"a/{n}", prompt, ("7",), meta),
            0,
            n,
            [Turn(ids_of(asked, chat), [*ids_of(text, chat), chat.eos_token_id], text=text)],
        )
        for n, text in enumerate(texts)
    ]


def values(function: Any, episodes: list[Episode], **section: Any) -> list[float]:
    name = f"{HERE}:{function if isinstance(function, str) else function.__name__}"
    [reward] = build_rewards({name: {"pool": False, **section}})
    check_examples([reward], [episode.example for episode in episodes])
    return call_reward(reward, episodes, tokenizer=chat)


# verl: a strict and a flexible reader of GSM8K's answers, and a score in a dictionary, as in its utils/reward_score


def strict_or_flexible(solution_str, ground_truth, method="strict", format_score=0.0, score=1.0):  # type: ignore
    if method == "strict":
        found = re.search(r"#### (\-?[0-9\.\,]+)", solution_str)
        answer = found[1].replace(",", "").replace("$", "") if found else None
    else:
        numbers = [one for one in re.findall(r"(\-?[0-9\.\,]+)", solution_str) if one not in ("", ".")]
        answer = numbers[-1] if numbers else None
    return 0 if answer is None else score if answer == ground_truth else format_score


def by_source(data_source, solution_str, ground_truth, extra_info=None):  # type: ignore[no-untyped-def]
    if data_source == "openai/gsm8k":
        return float(strict_or_flexible(solution_str, ground_truth))
    right = solution_str.endswith(ground_truth)
    return {"score": 1.0 if right else -1.0, "acc": right, "pred": solution_str[-3:], "split": extra_info["split"]}


def in_batches(data_sources, solution_strs, ground_truths, extra_infos, bonus=0.0):  # type: ignore[no-untyped-def]
    return [strict_or_flexible(text, right) + bonus for text, right in zip(solution_strs, ground_truths, strict=True)]


async def later(solution_str, ground_truth, **kwargs):  # type: ignore[no-untyped-def]
    return [float(ground_truth in solution_str), "why"]


def verl_rows(source: str) -> list[Episode]:
    columns = {"data_source": source, "reward_model": {"style": "rule", "ground_truth": "7"}}
    return answered(*ANSWERS, **columns, extra_info={"split": "train", "index": 0})


@pytest.mark.parametrize("section", [{}, {"method": "flexible", "format_score": 0.1}])
def test_verl_s_score_of_one_answer(section: dict[str, Any]) -> None:
    expected = [float(strict_or_flexible(text, "7", **section)) for text in ANSWERS]
    assert values(strict_or_flexible, verl_rows("openai/gsm8k"), **section) == expected
    assert len({*expected}) == (3 if section else 2) and style_of(strict_or_flexible, "x") == "verl"


def test_verl_s_score_by_source_with_a_dictionary() -> None:
    """`score` counts, the rest is recorded: numbers as components of weight 0, texts beside the answer."""
    assert values(by_source, verl_rows("openai/gsm8k")) == [float(strict_or_flexible(text, "7")) for text in ANSWERS]
    episodes, [reward] = verl_rows("math_dapo"), build_rewards({f"{HERE}:by_source": {"pool": False}})
    apply_rewards(episodes, [reward], tokenizer=chat)
    found = [by_source("math_dapo", text, "7", {"split": "train"}) for text in ANSWERS]
    assert [one.score for one in episodes] == [one["score"] for one in found]
    assert [one.reward_components[f"{reward.name}/acc"] for one in episodes] == [float(one["acc"]) for one in found]
    assert [one.turns[-1].info for one in episodes] == [
        {f"{reward.name}/pred": one["pred"], f"{reward.name}/split": "train"} for one in found
    ]
    with pytest.raises(LmgymError, match="written for verl, needs 'data_source' of each example"):
        values(by_source, answered("7"))


def test_verl_s_batches_and_coroutines() -> None:
    expected = [strict_or_flexible(text, "7") + 0.5 for text in ANSWERS]
    assert values(in_batches, verl_rows("openai/gsm8k"), bonus=0.5) == expected
    assert values(later, answered(*ANSWERS)) == [float("7" in text) for text in ANSWERS]  # the first reference
    with pytest.raises(LmgymError, match=r"unknown key '.*in_batches\.bonsu'; did you mean 'bonus'"):
        values(in_batches, verl_rows("openai/gsm8k"), bonsu=0.5)


def with_defaults(solution_str, ground_truth="7", data_source="openai/gsm8k", extra_info=()):  # type: ignore
    seen.append((ground_truth, data_source, extra_info))
    return 1.0


def batch_with_defaults(solution_strs, ground_truths, data_sources=("none",), extra_infos=None):  # type: ignore
    seen.append((ground_truths, data_sources, extra_infos))
    return [1.0] * len(solution_strs)


def named_and_others(solution_str, extra_info=3, **kwargs):  # type: ignore[no-untyped-def]
    seen.append((extra_info, kwargs))
    return 1.0


ADDED = {"num_turns": 2, "rollout_reward_scores": {}}  # by verl's manager, to extra_info


def test_what_the_data_lack_is_the_function_s_own_default() -> None:
    bare = Episode(Example("a/0", "3+4?"), 0, 0, [Turn([1], [2], text="7")])
    seen.clear()
    values(with_defaults, [bare, *answered("7", data_source="math", extra_info={"level": 2})])
    assert seen == [("7", "openai/gsm8k", ADDED), ("7", "math", {"level": 2, **ADDED})]
    seen.clear()
    values(batch_with_defaults, [bare, *answered("7", extra_info={"level": 2})])
    assert seen == [([None, "7"], ("none",), [ADDED, {"level": 2, **ADDED}])]
    seen.clear()
    values(named_and_others, [bare])
    assert seen == [(ADDED, {"data_source": None, "ground_truth": None})]  # verl gives these


def seen_by_verl(solution_str: str, ground_truth: str) -> float:
    seen.append(solution_str)
    return 1.0


def conversation() -> Episode:
    """A call of a tool, its result, and the answer."""
    [first] = answered("call", prompt=USER)
    between = "\n<|im_start|>tool\n7<|im_end|>\n<|im_start|>assistant\n"
    first.turns.append(Turn(ids_of(between, chat), [*ids_of("So 7.", chat), chat.eos_token_id], text="So 7."))
    first.messages = [
        {"role": "system", "content": "Tools: add"},
        *USER,
        {"role": "assistant", "content": "call"},
        {"role": "tool", "content": "7"},
        {"role": "assistant", "content": "So 7."},
    ]
    return first


def by_turns(data_source, solution_str, ground_truth, extra_info):  # type: ignore[no-untyped-def]
    return extra_info["num_turns"] + extra_info.get("level", 0.0) + len(extra_info["rollout_reward_scores"])


def test_verl_s_manager_counts_the_turns() -> None:
    """User and assistant; a call of a tool and its result are two more. The examples keep their own dictionary."""
    episodes = [conversation(), *answered("4", data_source="a", extra_info={"level": 0.5})]
    episodes[0].example.meta["data_source"] = "a"
    assert values(by_turns, episodes) == [4.0, 2.5]
    assert episodes[1].example.meta["extra_info"] == {"level": 0.5}
    assert values(by_turns, answered("4", data_source="a")) == [2.0]  # no such column


def test_verl_reads_all_turns() -> None:
    seen.clear()
    values(seen_by_verl, [conversation(), *answered("4")])
    assert seen == ["call\ntool\n7\nassistant\nSo 7.", "4"]  # decoded without special tokens, as in verl


def countdown(solution_str, ground_truth):  # type: ignore[no-untyped-def]
    """As TinyZero's: the answer is what stands behind the mark of the assistant; without one there is none."""
    if "<|im_start|>assistant" not in solution_str:
        return 0
    answer = solution_str.split("<|im_start|>assistant", 1)[1]
    return 1.0 if ground_truth in answer else 0.1


def test_verl_s_older_form_reads_the_prompt_too() -> None:
    episodes = answered(*ANSWERS)
    assert values(countdown, episodes) == [0.0] * 10
    expected = [1.0 if "7" in text else 0.1 for text in ANSWERS]
    assert values(countdown, episodes, style="verl_sequence") == expected
    [reward] = build_rewards({f"{HERE}:countdown": {"pool": False}})
    assert "style: verl_sequence" in why_never_paid(reward, episodes, tokenizer=chat)


# OpenRLHF


def openrlhf_s(episodes: list[Episode]) -> Any:
    """What OpenRLHF calls its function with: prompt and answer, decoded with special tokens."""
    prompt = chat.apply_chat_template(USER, tokenize=False, add_generation_prompt=True)
    queries = [prompt + one.text + "<|im_end|>" for one in episodes]
    return queries, [prompt] * len(queries), ["7"] * len(queries)


def test_openrlhf_s_function() -> None:
    episodes, [reward] = answered(*ANSWERS), build_rewards({f"{LIGHT}:reward_func": {"pool": False}})
    assert style_of(reward_func, "x") == "openrlhf"
    seen.clear()
    apply_rewards(episodes, [reward], tokenizer=chat)
    assert seen == [openrlhf_s(episodes)]
    found = reward_func(*openrlhf_s(episodes))
    assert [one.score for one in episodes] == found["rewards"] and len({*found["rewards"]}) == 2
    for one, score in zip(episodes, found["scores"], strict=True):
        assert one.reward_components[f"{reward.name}/scores"] == score
        assert one.reward_components[f"{reward.name}/mean"] == found["extra_logs"]["mean"]


@pytest.mark.processes
def test_openrlhf_s_function_in_a_worker_reads_the_same() -> None:
    [here] = build_rewards({f"{LIGHT}:reward_func": {"pool": False}})
    [there] = build_rewards({f"{LIGHT}:reward_func": 1.0})
    one, other = answered(*ANSWERS), answered(*ANSWERS)
    apply_rewards(one, [here], tokenizer=chat)
    apply_rewards(other, [there], tokenizer=chat)
    assert there.pooled is not None
    assert [episode.reward_components for episode in one] == [episode.reward_components for episode in other]


@pytest.fixture
def server() -> Any:
    asked: list[Any] = []

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            asked.append(body)
            asks = body["query"][0] if body["query"] else ""
            found = {} if "break" in asks else reward_func(body["query"], body["prompts"], body["labels"])
            found |= {"extra_logs": [1.0, 2.0]} if "unnamed" in asks else {}
            reply = b"[" * 200_000 if "nest" in asks else json.dumps(found).encode()
            self.send_response(200)
            self.send_header("Content-Length", str(len(reply)))
            self.end_headers()
            self.wfile.write(reply)

        def log_message(self, *_: Any) -> None: ...

    running = HTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=running.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{running.server_port}/get_reward", asked
    running.shutdown()
    running.server_close()


def test_openrlhf_s_server(server: Any) -> None:
    url, asked = server
    episodes, [reward] = answered(*ANSWERS), build_rewards({"remote_reward": {"url": url}})
    apply_rewards(episodes, [reward], tokenizer=chat)
    queries, prompts, labels = openrlhf_s(episodes)
    assert asked == [{"query": queries, "prompts": prompts, "labels": labels}]
    assert [one.score for one in episodes] == reward_func(queries, prompts, labels)["rewards"]
    for hostile in ("break", "nest"):
        with pytest.raises(LmgymError, match="is no JSON object with 'rewards'"):
            call_reward(reward, answered(hostile), tokenizer=chat)
    with pytest.raises(LmgymError, match=r"'extra_logs' must be names with values, got \[1\.0, 2\.0\]"):
        call_reward(reward, answered("unnamed"), tokenizer=chat)
    with pytest.raises(LmgymError, match="is no plain address"):
        call_reward(build_rewards({"remote_reward": {"url": "localhost"}})[0], answered("7"), tokenizer=chat)


# TRL: whole completions, arguments, factories


def calls_and_answer(completions, bonus=0.0, **kwargs):  # type: ignore[no-untyped-def]
    return [
        0.1 * sum(message["role"] == "tool" for message in one) + float("7" in one[-1]["content"]) + bonus
        for one in completions
    ]


def of_environments(environments, **kwargs):  # type: ignore[no-untyped-def]
    return [float(environment.found) for environment in environments]


def test_trl_gets_whole_conversations() -> None:
    """TRL's completion of an agent is all messages behind the prompt: calls, results, answer."""
    one = conversation()
    assert written_of(one) == one.messages[2:]
    assert values(calls_and_answer, [one], bonus=2.0) == [0.1 + 1.0 + 2.0]
    [two] = answered("<think>8</think>7", prompt=USER)
    assert values(calls_and_answer, [two], strip_thinking=True) == [1.0]
    one.turns[0].restart = False
    one.turns[1].restart = True  # the environment has begun a new conversation: only that is left
    one.messages = [*USER, {"role": "assistant", "content": "So 7."}]
    assert written_of(one) == [{"role": "assistant", "content": "So 7."}]


def first_messages(completions, **kwargs):  # type: ignore[no-untyped-def]
    seen.extend([message["content"] for message in one] for one in completions)
    return [float(one[0]["content"] == "a1") for one in completions]


def completion_of_verifiers(prompt, completion):  # type: ignore[no-untyped-def]
    return float(first_messages([completion])[0])


def long_conversation() -> Episode:
    """Three answers, the second with a result of a calculator in it, behind an answer that the prompt has shown."""
    texts = ("shown?", "shown", "q", "a1", "e1", "a2=4b", "e2", "a3")
    messages = [{"role": ("user", "assistant")[n % 2], "content": text} for n, text in enumerate(texts)]
    turns = [Turn([1], [2], text=text) for text in ("a1", "a2", "b", "a3")]
    turns[1].continuation, turns[1].unfinished = "=4", True
    return Episode(Example("a/0", messages[:3], ("7",)), 0, 0, turns, messages=messages, chat=True)


@pytest.mark.parametrize("function", [first_messages, completion_of_verifiers])
def test_each_turn_is_judged_with_the_conversation_up_to_there(function: Any) -> None:
    [reward] = build_rewards({f"{HERE}:{function.__name__}": {"each_turn": True, "pool": False}})
    episode = long_conversation()
    seen.clear()
    apply_rewards([episode], [reward])
    assert seen == [["a1"], ["a1", "e1", "a2=4b"], ["a1", "e1", "a2=4b", "e2", "a3"]]
    assert [turn.reward for turn in episode.turns] == [1.0, 0.0, 1.0, 1.0]
    # A conversation that has begun anew does not lend its messages to the turns before.
    anew = long_conversation()
    anew.turns[3].restart, anew.messages = True, [*anew.messages[:3], {"role": "assistant", "content": "a3"}]
    seen.clear()
    apply_rewards([anew], [reward])
    assert seen == [["a1"], ["a2=4b"], ["a3"]]


@pytest.mark.parametrize("text", ["A2=4B", ""])
def test_a_changed_text_is_one_message(text: str) -> None:
    """An answer that the prompt has shown is no answer of the policy, whatever a post-processor makes of the text."""
    episode = long_conversation()
    episode.turns, episode.messages = episode.turns[1:3], [*episode.messages[:3], {"role": "assistant", "content": "x"}]
    assert written_of(with_text(episode, text)) == [{"role": "assistant", "content": text}]


def test_trl_s_environments_are_what_the_environment_notes() -> None:
    episodes = answered("a", "b")
    for number, one in enumerate(episodes):
        one.turns[-1].info = {"found": number}
    assert values(of_environments, episodes) == [0.0, 1.0]
    with pytest.raises(LmgymError, match=r"environments` hold what the environment notes in Step\.info"):
        values(of_environments, answered("a"))


@pytest.mark.processes
@pytest.mark.parametrize("pool", [True, False])
@pytest.mark.parametrize("name", ["get_scaled", "Scaled"])
def test_factories(name: str, pool: bool) -> None:
    [reward] = build_rewards({f"{LIGHT}:{name}": {"scale": 2.0, "weight": 0.5, "pool": pool}})
    assert (reward.weight, bool(reward.pooled)) == (0.5, pool)
    assert call_reward(reward, answered(*ANSWERS)) == [2.0 * len(text) for text in ANSWERS]
    with pytest.raises(LmgymError, match=r"takes \(scale.*which is no form of reward"):
        build_rewards({f"{LIGHT}:{name}": {"scales": 2.0}})


def test_trl_s_own_rewards() -> None:
    """The installed TRL's functions called by TRL's rules, and by lmgym: arguments, factories, texts and messages."""
    rewards = pytest.importorskip("trl.rewards")
    thoughts = ["<think>\n2\n</think>\n$7$", "<think>2</think>7", "7", *ANSWERS[:7]]
    chats = answered(*thoughts, prompt=USER, solution="$7$")
    completions = [[{"role": "assistant", "content": text}] for text in thoughts]

    def ours(name: str, episodes: list[Episode], **section: Any) -> list[float]:
        [reward] = build_rewards({f"trl.rewards:{name}": {"pool": False, **section}})
        return call_reward(reward, episodes)

    assert ours("think_format_reward", chats) == rewards.think_format_reward(completions)
    given = {"completions": completions, "solution": ["$7$"] * 10}
    assert ours("accuracy_reward", chats) == [value or 0.0 for value in rewards.accuracy_reward(**given)]
    for delimiters in (["</think>"], ["####"]):
        theirs = rewards.reasoning_accuracy_reward(**given, reasoning_delimiters=delimiters)
        found = ours("reasoning_accuracy_reward", chats, reasoning_delimiters=delimiters)
        assert found == [value or 0.0 for value in theirs]
    ids = [list(one.turns[-1].action_ids) for one in chats]
    limits = {"max_completion_len": 20, "soft_punish_cache": 15}
    theirs = rewards.get_soft_overlong_punishment(**limits)(completions=completions, completion_ids=ids)
    assert ours("get_soft_overlong_punishment", chats, **limits) == theirs and len({*theirs}) > 3


# open-r1's registry: functions, factories with arguments, and a partial of one, as its rewards.py has them


def tag_count_reward(completions, **kwargs):  # type: ignore[no-untyped-def]
    def count(text: str) -> float:
        marks = ("<think>\n", "\n</think>\n", "\n<answer>\n", "\n</answer>")
        return sum(0.25 for mark in marks if text.count(mark) == 1)

    return [count(completion[0]["content"]) for completion in completions]


def get_cosine_scaled_reward(  # type: ignore[no-untyped-def]
    min_value_wrong=-1.0, max_value_wrong=-0.5, min_value_correct=0.5, max_value_correct=1.0, max_len=1000
):
    import math

    def cosine_scaled_reward(completions, solution, **kwargs):  # type: ignore[no-untyped-def]
        found = []
        for completion, right in zip(completions, solution, strict=True):
            text = completion[0]["content"]
            low, high = (min_value_correct, max_value_correct) if right in text else (max_value_wrong, min_value_wrong)
            found.append(low + 0.5 * (high - low) * (1.0 + math.cos(len(text) / max_len * math.pi)))
        return found

    return cosine_scaled_reward


def get_repetition_penalty_reward(ngram_size: int, max_penalty: float):  # type: ignore[no-untyped-def]
    def repetition_penalty_reward(completions, **kwargs):  # type: ignore[no-untyped-def]
        found = []
        for completion in completions:
            words = completion[0]["content"].lower().split()
            grams = list(zip(*[words[start:] for start in range(ngram_size)], strict=False))
            found.append((1 - len({*grams}) / len(grams)) * max_penalty if grams else 0.0)
        return found

    return repetition_penalty_reward


def code_reward(completions, num_parallel: int = 2, provider_type: str = "e2b", **kwargs):  # type: ignore
    return [float(num_parallel) if provider_type == "local" else 0.0 for _ in completions]


REGISTRY: list[tuple[Any, dict[str, Any]]] = [
    (tag_count_reward, {}),
    (get_cosine_scaled_reward, {}),
    (get_cosine_scaled_reward, {"max_len": 20, "min_value_wrong": -2.0}),
    (get_repetition_penalty_reward, {"ngram_size": 2, "max_penalty": -1.0}),
    (code_reward, {"num_parallel": 4, "provider_type": "local"}),
]


@pytest.mark.parametrize(("function", "arguments"), REGISTRY)
def test_open_r1_s_registry(function: Any, arguments: dict[str, Any]) -> None:
    """A name of the registry is a function, a factory, or a partial: in a recipe all are a name with arguments."""
    texts = ("<think>\na\n</think>\n<answer>\n7\n</answer>", "7 7 7 7", "a b a b a b", *ANSWERS[:7])
    chats = answered(*texts, prompt=USER, solution="7")
    given = {"completions": [[{"role": "assistant", "content": text}] for text in texts], "solution": ["7"] * 10}
    called = function(**arguments) if function.__name__.startswith("get_") else function
    extra = {} if called is not function else arguments
    assert values(function, chats, **arguments) == called(**given, **extra)
