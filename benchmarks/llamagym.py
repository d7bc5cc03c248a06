"""Games of Blackjack-v1 per second: lmgym's rollouts against LlamaGym's own way.

    python -m benchmarks.llamagym                      7 rounds after one of warm-up, one thread
    python -m benchmarks.llamagym --rounds 3 --games 4
    python -m benchmarks.llamagym --profile            what lmgym's side spends its time on

LlamaGym's way: one game at a time; each turn the whole conversation is rendered through the chat template, tokenized
anew and read from its beginning by Hugging Face's `generate`, batch 1; the answer is what stands behind the last
[/INST]. lmgym's: `rollout.collect`, 256 games side by side, one process, caches held from turn to turn, ids kept,
log-probabilities and kept sets with them. Model, template, agent, temperature, top-p and the number of new tokens of
each answer (min_new_tokens = max_new_tokens) are the same. The games are not: each side has seeds of its own.

Both are measured in one process, in turn (A B A B), and ratios are taken within a round. Neither trains:
it is the rollouts that are compared.
"""

import argparse
import cProfile
import json
import os
import pstats
import statistics
import sys
import time
from functools import partial
from pathlib import Path
from typing import Any

import gymnasium
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from benchmarks.interleave import ROOT
from benchmarks.reports import machine, ratio, today
from lmgym.compat.llamagym import Agent
from lmgym.envs.gymnasium import Gymnasium
from lmgym.envs.vector import InProcess
from lmgym.inference.base import Sampling
from lmgym.inference.sampler import Sampler
from lmgym.models.policy import Policy
from lmgym.rollouts.rollout import Actor, collect
from lmgym.types import Example

# Like Llama 2's: the system prompt stands in the first user message.
TEMPLATE = (
    "{{ bos_token }}{% for m in messages %}{% if m.role == 'system' %}[INST] <<SYS>>\n{{ m.content }}\n<</SYS>>\n\n"
    "{% elif m.role == 'user' %}{% if loop.first or messages[loop.index0 - 1].role != 'system' %}[INST] {% endif %}"
    "{{ m.content }} [/INST]{% else %} {{ m.content }} {{ eos_token }}{% endif %}{% endfor %}"
)


class Player(Agent):
    """The agent of LlamaGym's README: any answer without the word stick is a hit, so every answer is an action."""

    def get_system_prompt(self) -> str:
        return "You are an expert blackjack player."

    def format_observation(self, observation: Any) -> str:
        return f"Your current total is {observation[0]}"

    def extract_action(self, text: str) -> int:
        return 0 if "stick" in text else 1


def one_by_one(model: Any, tokenizer: Any, seeds: list[int], new_tokens: int) -> int:
    """Play these games LlamaGym's way; returns the number of turns."""
    player, turns, env = Player(), 0, gymnasium.make("Blackjack-v1")
    for seed in seeds:
        observation, _ = env.reset(seed=seed)
        messages, over = [{"role": "system", "content": player.get_system_prompt()}], False
        while not over:
            messages.append({"role": "user", "content": player.format_observation(observation)})
            text = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
            ids = tokenizer(text, return_tensors="pt", add_special_tokens=False)
            said = model.generate(
                **ids,
                max_new_tokens=new_tokens,
                min_new_tokens=new_tokens,
                do_sample=True,
                temperature=0.9,
                top_p=0.6,
                top_k=0,
                pad_token_id=tokenizer.pad_token_id,
            )
            answer = tokenizer.decode(said[0]).split("[/INST]")[-1].strip()
            messages.append({"role": "assistant", "content": answer})
            observation, _, terminated, truncated, _ = env.step(player.extract_action(answer))
            turns, over = turns + 1, terminated or truncated
    return turns


def side_by_side(actor: Actor, number: int, games: int, new_tokens: int) -> int:
    """Play so many games lmgym's way; returns the number of turns."""
    sampling = Sampling(temperature=0.9, top_p=0.6, max_new_tokens=new_tokens, min_new_tokens=new_tokens)
    make = partial(Gymnasium, id="Blackjack-v1", agent="benchmarks.llamagym:Player")
    prompts = [(game, Example(f"game/{game}", "")) for game in range(games)]
    episodes = collect(prompts, actor, sampling, (0, "benchmark", number), InProcess(make))
    assert all(len(turn.action_ids) == new_tokens for episode in episodes for turn in episode.turns)
    return sum(len(episode.turns) for episode in episodes)


def main() -> None:
    given = parsed()
    torch.set_num_threads(given.threads)
    model = AutoModelForCausalLM.from_pretrained(given.model, dtype=torch.float32)
    tokenizer = AutoTokenizer.from_pretrained(given.model)
    tokenizer.chat_template = TEMPLATE
    policy = Policy(model, tokenizer)
    actor = Actor(Sampler(policy, rows=given.side_by_side), tokenizer)
    if given.profile:
        profile(actor, given)
        return
    seconds: dict[str, list[float]] = {"LlamaGym's way": [], "lmgym": []}
    cpu, turns = ({name: list[float]() for name in seconds} for _ in range(2))
    for number in range(given.warmup + given.rounds):
        seeds = [number * given.games + game for game in range(given.games)]
        plays = {
            "LlamaGym's way": (partial(one_by_one, model, tokenizer, seeds, given.new_tokens), given.games),
            "lmgym": (partial(side_by_side, actor, number, given.side_by_side, given.new_tokens), given.side_by_side),
        }
        for name, (play, games) in plays.items():
            began, began_cpu = time.perf_counter(), time.process_time()
            count = play()
            spent, spent_cpu = time.perf_counter() - began, time.process_time() - began_cpu
            if number >= given.warmup:
                seconds[name].append(spent / games)
                cpu[name].append(spent_cpu / games)
                turns[name].append(count / games)
            print(f"round {number:>2}  {name:<15} {games / spent:8.2f} games/s", file=sys.stderr, flush=True)
    report(seconds, cpu, turns, given)


def report(
    seconds: dict[str, list[float]],
    cpu: dict[str, list[float]],
    turns: dict[str, list[float]],
    given: argparse.Namespace,
) -> None:
    """A table; the ratio of games per second, by the clock and by seconds of CPU, which other work on the machine moves
    less; and of turns per second, which does not depend on how long the games happened to be."""
    print(f"{today()}; {machine(given.threads)}; {given.new_tokens} new tokens an answer, {given.rounds} rounds\n")
    print("| way | games/s (min to max) | turns a game | ms a turn | CPU ms a turn |")
    print("|---|---|---|---|---|")
    for name, own in seconds.items():
        rates = [1 / each for each in own]
        mean = statistics.mean(turns[name])
        spread = f"{statistics.median(rates):.2f} ({min(rates):.2f} to {max(rates):.2f})"
        cells = [1e3 * statistics.median(a_turn(times[name], turns[name])) for times in (seconds, cpu)]
        print(f"| {name} | {spread} | {mean:.2f} | {cells[0]:.2f} | {cells[1]:.2f} |")
    print(f"\ngames per second, ratio within a round: {ratio(*seconds.values())}; by CPU {ratio(*cpu.values())}")
    by_turn = [ratio(*(a_turn(times[name], turns[name]) for name in seconds)) for times in (seconds, cpu)]
    print(f"turns per second: {by_turn[0]}; by CPU {by_turn[1]}")
    if given.out:
        with given.out.open("a", encoding="utf-8") as file:
            load = os.getloadavg()[0]
            record = {"seconds_a_game": seconds, "cpu_seconds_a_game": cpu, "turns_a_game": turns, "load": load}
            file.write(json.dumps(record) + "\n")


def a_turn(a_game: list[float], turns: list[float]) -> list[float]:
    return [spent / count for spent, count in zip(a_game, turns, strict=True)]


def profile(actor: Actor, given: argparse.Namespace) -> None:
    """Where lmgym's side spends its time: the functions that cost most, themselves and with what they call."""
    side_by_side(actor, 0, given.side_by_side, given.new_tokens)
    profiler = cProfile.Profile()
    profiler.runcall(side_by_side, actor, 1, given.side_by_side, given.new_tokens)
    for order in ("tottime", "cumtime"):
        pstats.Stats(profiler).strip_dirs().sort_stats(order).print_stats(25)


def parsed() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    model = ROOT.parent / "shared" / "models" / "stories260K-hf"
    parser.add_argument("--model", type=Path, default=model, help="folder of a causal model (default: %(default)s)")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--warmup", type=int, default=1, help="rounds before them that do not count")
    parser.add_argument("--games", type=int, default=16, help="of LlamaGym's way in a round")
    parser.add_argument("--side-by-side", type=int, default=256, help="lmgym's games in a round, all at once")
    parser.add_argument("--new-tokens", type=int, default=32, help="of each answer, exactly")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--profile", action="store_true", help="profile lmgym's side and measure nothing")
    parser.add_argument("--out", type=Path, help="append every round's numbers to this .jsonl")
    return parser.parse_args()


if __name__ == "__main__":
    main()
