"""`policy.answer_start`: each answer begins with a text that is neither sampled nor trained on."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from lmgym.batch import collate
from lmgym.envs.base import Step
from lmgym.inference.base import Sampling
from lmgym.inference.sampler import Sampler
from lmgym.models.load import load_policy
from lmgym.models.policy import Policy
from lmgym.models.policy_section import PolicySection
from lmgym.rewards.views import strip_thoughts, with_text
from lmgym.rollouts.actor import Actor
from lmgym.rollouts.rollout import collect, demonstrate
from lmgym.text.chat import continued_ids
from lmgym.types import Example, Turn
from tests import rounding, runs

START = " Let's think:"
TEMPLATE = (
    "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}{% if add_generation_prompt %}<a>{% endif %}"
)
EXAMPLE = Example("x/0", "2+2=", ("4",))
SHORT = Sampling(max_new_tokens=5)


def policy_of(name: str) -> Policy:
    return load_policy(PolicySection(model=f"builtin:{name}", device="cpu", compute="float32"))


POLICIES = {name: policy_of(name) for name in ("tiny", "tiny_t5", "tiny_bart")}


def actor_of(name: str, start: str = START, template: str = "") -> Actor:
    policy = POLICIES[name]
    policy.tokenizer.chat_template = template or None
    return Actor(Sampler(policy, 8), policy.tokenizer, decoder_start=policy.decoder_start, answer_start=start)


class Twice:
    """Two messages of the policy, the second in two pieces."""

    def reset(self, example: Example, seed: int) -> Any:
        self.count = 0
        return example.prompt

    def step(self, text: str, stop: str) -> Step:
        self.count += 1
        if self.count == 1:
            return Step(messages=[{"role": "user", "content": "and?"}])
        return Step(continuation="!" if self.count == 2 else None, terminated=self.count == 3)


@pytest.mark.parametrize("name", POLICIES)
def test_the_start_is_given_and_the_rest_is_scored_as_it_was_sampled(name: str) -> None:
    actor = actor_of(name)
    start = continued_ids(actor.tokenizer, START)
    [plain] = collect([(0, EXAMPLE)], actor_of(name, ""), SHORT, (0,))
    [episode] = collect([(0, EXAMPLE)], actor, SHORT, (0,))
    [turn] = episode.turns
    assert turn.prompt_ids == [*plain.turns[0].prompt_ids, *start] and turn.source_ids == plain.turns[0].source_ids
    assert episode.text == START + turn.text and plain.text == plain.turns[0].text
    batch = collate([episode])
    assert batch.actions[0].tolist() == [False] * len(turn.prompt_ids) + [True] * len(turn.action_ids)
    found = POLICIES[name].compute_logprobs_no_grad(batch).logprobs
    assert rounding.near(POLICIES[name].model, found[batch.actions], turn.logprobs)


@pytest.mark.parametrize("name", POLICIES)
def test_greedy_answers_are_those_of_generate(name: str) -> None:
    """Hugging Face's `generate`, given the same first tokens."""
    greedy = replace(SHORT, temperature=0.0)
    requests = [Example(f"x/{n}", text) for n, text in enumerate(("2+2=", "1+1="))]
    prompts = list(enumerate(requests))
    ours = collect(prompts, actor_of(name), greedy, (0,))
    policy, actor = POLICIES[name], actor_of(name)
    for episode in ours:
        [turn] = episode.turns
        given = torch.tensor([turn.prompt_ids])
        inputs = {"inputs": torch.tensor([turn.source_ids]), "decoder_input_ids": given} if turn.source_ids else {}
        ids = policy.model.generate(
            **(inputs or {"inputs": given}), max_new_tokens=5, do_sample=False, eos_token_id=list(policy.stop_ids),
            pad_token_id=policy.pad_id,
        )[0, given.shape[1] :].tolist()  # fmt: skip
        assert ids[: len(turn.action_ids)] == turn.action_ids and len(turn.action_ids) > 0
    assert actor.start_ids == ours[0].turns[0].prompt_ids[-len(actor.start_ids) :]


def test_every_message_begins_with_it_behind_the_template() -> None:
    actor = actor_of("tiny", template=TEMPLATE)
    [episode] = collect([(0, EXAMPLE)], actor, SHORT, (0,), Twice)
    read = [actor.tokenizer.decode(turn.prompt_ids) for turn in episode.turns]
    assert [turn.given for turn in episode.turns] == [START, START, ""]
    assert read[0] == "<user>2+2=<a>" + START and read[1].endswith("<user>and?<a>" + START) and read[2] == "!"
    first, second = (turn.text for turn in episode.turns[1:])
    assert episode.text == START + first + "!" + second


def test_an_encoder_reads_earlier_answers_with_their_start() -> None:
    class Again(Twice):
        def step(self, text: str, stop: str) -> Step:
            self.count += 1
            return Step(messages=[{"role": "user", "content": "and?"}], terminated=self.count == 2)

    actor = actor_of("tiny_bart")
    [episode] = collect([(0, EXAMPLE)], actor, SHORT, (0,), Again)
    one, two = episode.turns
    before = [*one.source_ids, *actor.start_ids, *one.action_ids]
    assert two.source_ids[: len(before)] == before and two.prompt_ids == one.prompt_ids == list(actor.decoder_ids)


@pytest.mark.parametrize("name", POLICIES)
def test_references_are_imitated_behind_the_start(name: str) -> None:
    actor = actor_of(name)
    [episode] = demonstrate([(0, EXAMPLE)], actor, (0,))
    [turn] = episode.turns
    assert turn.prompt_ids[-len(actor.start_ids) :] == actor.start_ids
    assert actor.tokenizer.decode(turn.action_ids[:-1]) == "4" and turn.action_ids[-1] == actor.tokenizer.eos_token_id
    assert episode.text == START + "4"


def test_rewards_see_the_start_of_the_text_that_they_judge() -> None:
    [episode] = collect([(0, EXAMPLE)], actor_of("tiny"), SHORT, (0,))
    thought = replace(episode, turns=[Turn([1], [2], text="hm</think>4", given="<think>")])
    assert strip_thoughts(thought, True).text == "4" and with_text(thought, "5").text == "5"


@pytest.mark.slow
def test_without_a_chat_template_it_is_the_suffix_of_the_prompt(tmp_path: Path) -> None:
    """A run with answer_start is that with prompt_suffix, bit for bit, where the reward does not depend on the start;
    its rewards see the text, and a resumed run goes on with it."""
    rewards = {"regex": {"pattern": "[0-9]"}}
    start = runs.run(tmp_path / "start", rewards=rewards, policy={**runs.TINY["policy"], "answer_start": START})
    suffix = runs.run(tmp_path / "suffix", rewards=rewards, task={**runs.TINY["task"], "prompt_suffix": START})
    for name in ("final/model.safetensors",):
        assert (start / name).read_bytes() == (suffix / name).read_bytes()
    given = {turn.get("given") for record in runs.records(start / "rollouts.jsonl") for turn in record["turns"]}
    assert given == {START}
    assert not any("given" in turn for record in runs.records(suffix / "rollouts.jsonl") for turn in record["turns"])


@pytest.mark.slow
def test_an_encoder_decoder_trains_and_generates_with_it(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    from lmgym.cli.main import main

    policy = {"model": "builtin:tiny_t5", "device": "cpu", "answer_start": START}
    folder = runs.run(tmp_path / "run", policy=policy, steps=2, evaluation={"every": 1, "examples": 4})
    assert all(record["turns"][0]["given"] == START for record in runs.records(folder / "rollouts.jsonl"))
    assert main(["generate", str(folder), "--prompt", "2+2="]) == 0
    assert capsys.readouterr().out.startswith(f"2+2={START}")
    assert main(["check", str(folder)]) in (0, 1)
