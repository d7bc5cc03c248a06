"""What the gateway costs: a GRPO step on the same conversation, said by `env: conversation` and by a program that asks.

python -m benchmarks.gateway_overhead --model ../models/SmolLM2-135M-Instruct
python -m benchmarks.gateway_overhead --model builtin:tiny --rounds 2 --tokens 4

Three contenders in one process, one step each in turn: the conversation, a function that is called for each episode
(`env.function`), and a command that is started for each (`python`, standard library only). All say the same, so the
policy samples the same tokens, which is checked: the ratio is of the same work. 4 prompts with 6 answers of 4 turns;
LoRA, so that three copies of a policy fit into the memory and the step is a short one.
"""

import argparse
import json
import os
import statistics
import sys
import tempfile
import time
import urllib.request
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from benchmarks import reports
from lmgym.config.build import build_config
from lmgym.config.schema import Config
from lmgym.core.registry import register
from lmgym.envs import conversation
from lmgym.logs.console import Console
from lmgym.training import loop
from lmgym.training.begin_stage import begin_stage
from lmgym.training.setup import start
from lmgym.training.stage import StageRun
from lmgym.updates.prepare import prepare
from lmgym.updates.update import update

SCRIPT = ["And 3 more?", "Once more, please.", "Say it in other words."]
MOST = 1.05  # the aim: times as long as the conversation


@register("env", "benchmark_conversation")
class Conversation(conversation.Conversation):
    """Goes on behind an answer of the full length, as the program does; the original gives the episode up there."""

    def step(self, text: str, stop: str) -> Any:
        return super().step(text, "eos")


def talk(example: dict[str, Any]) -> None:
    """The program: the example's question, then the script."""
    messages = [{"role": "user", "content": example["prompt"]}]
    for question in [*SCRIPT, None]:
        key = {"Authorization": f"Bearer {os.environ['OPENAI_API_KEY']}", "Content-Type": "application/json"}
        body = json.dumps({"messages": messages}).encode()
        request = urllib.request.Request(f"{os.environ['OPENAI_BASE_URL']}/chat/completions", body, key)
        with urllib.request.urlopen(request) as reply:
            messages.append(json.load(reply)["choices"][0]["message"])
        messages.append({"role": "user", "content": question or ""})


COMMAND = f"""
import json, os, sys, urllib.request
SCRIPT = {SCRIPT!r}
messages = [{{"role": "user", "content": json.load(sys.stdin)["prompt"]}}]
key = {{"Authorization": "Bearer " + os.environ["OPENAI_API_KEY"], "Content-Type": "application/json"}}
for question in [*SCRIPT, None]:
    body = json.dumps({{"messages": messages}}).encode()
    request = urllib.request.Request(os.environ["OPENAI_BASE_URL"] + "/chat/completions", body, key)
    with urllib.request.urlopen(request) as reply:
        messages.append(json.load(reply)["choices"][0]["message"])
    messages.append({{"role": "user", "content": question or ""}})
"""
ENVS: dict[str, dict[str, Any]] = {
    "conversation": {"name": "benchmark_conversation", "user": "scripted", "script": SCRIPT},
    "function": {"name": "agent", "function": "benchmarks.gateway_overhead:talk", "reward": "none"},
    "command": {"name": "agent", "command": [sys.executable, "-S", "-c", COMMAND], "reward": "none"},
}


def main() -> None:
    arguments = parsed()
    seconds, processor = ({name: list[float]() for name in ENVS} for _ in range(2))
    with tempfile.TemporaryDirectory() as out, ExitStack() as stack:
        console = stack.enter_context(Console(quiet=True))
        stages = {}
        for name, env in ENVS.items():
            run = stack.enter_context(start(recipe(env, Path(out) / name, arguments), console))
            stages[name] = stack.enter_context(begin_stage(run))
            print(f"{name}: the policy is loaded", file=sys.stderr)
        for number in range(arguments.warmup + arguments.rounds):
            said = {}
            for name, stage in stages.items():
                began = time.perf_counter(), time.process_time()
                said[name] = one_step(stage)
                print(f"step {number + 1}, {name}: {time.perf_counter() - began[0]:.1f} s", file=sys.stderr)
                if number >= arguments.warmup:
                    seconds[name].append(time.perf_counter() - began[0])
                    processor[name].append(time.process_time() - began[1])
            for name, own in said.items():
                if own != said["conversation"]:
                    sys.exit(f"{name} and conversation have sampled other tokens in step {number + 1}: no comparison")
    report(seconds, processor, arguments)


def parsed() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", required=True, help="a folder, a name on the Hub, or builtin:tiny")
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--warmup", type=int, default=1)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--tokens", type=int, default=32, help="of each turn")
    return parser.parse_args()


def recipe(env: dict[str, Any], out: Path, arguments: argparse.Namespace) -> Config:
    """Answers of exactly so many tokens; their lengths in characters are the reward, so that groups train."""
    return build_config({
        "out": str(out),
        "threads": arguments.threads,
        "task": {"name": "arithmetic", "largest": 50},
        "env": env,
        "rewards": {"length": {"target": 40}},
        "policy": {"model": arguments.model, "lora_rank": 16, "device": "cpu"},
        "sampling": {"max_new_tokens": arguments.tokens, "min_new_tokens": arguments.tokens},
        "algorithm": {"name": "grpo", "group_size": 6},
        "optimizer": {"learning_rate": 1e-5},
        "prompts_per_step": 4,
        "steps": 1_000_000,
    })  # fmt: skip


def one_step(stage: StageRun) -> list[list[int]]:
    """A step as `train` takes it; the tokens that it has sampled."""
    step = stage.step
    loop.begin_step(stage, step)
    answers = loop.gather(stage, step)
    batch = loop.collate_step(stage, answers, step)
    batch = prepare(batch, stage.run.policy, stage.frozen_models.models, stage.algorithm)
    metrics = update(stage.algorithm, stage.run.policy, batch, stage.optimizer)
    loop.advance(stage)
    loop.log_step(stage, answers, batch, metrics)
    return [turn.action_ids for answer in answers for turn in answer.turns]


def report(seconds: dict[str, list[float]], processor: dict[str, list[float]], arguments: argparse.Namespace) -> None:
    """Seconds by the clock; those of the processor are of the training process alone, without the programs."""
    print("| the conversation is said by | s a step | times as long (range over the rounds) | processor s |")
    print("|---|---|---|---|")
    for name, own in seconds.items():
        ratio = reports.ratio(own, seconds["conversation"])
        print(f"| {name} | {statistics.median(own):.3f} | {ratio} | {statistics.median(processor[name]):.3f} |")
    ratios = [one / other for one, other in zip(seconds["function"], seconds["conversation"], strict=True)]
    held = "is" if statistics.median(ratios) < MOST else "is NOT"
    print(
        f"\nThe function's overhead {held} below {100 * (MOST - 1):.0f} % of a step (median of {len(ratios)} rounds)."
    )
    print(f"{arguments.model}, {arguments.threads} threads, 24 conversations of 4 turns of {arguments.tokens} tokens")


if __name__ == "__main__":
    main()
