"""Sessions at the gateway under the chat templates of five families: the captured ids are those of transformers' own
rendering around the sampled tokens, and the captured log-probabilities those of its teacher-forced pass."""

import json
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from lmgym.core.errors import LmgymError
from lmgym.envs.program import AgentProgram
from lmgym.envs.vector import InProcess
from lmgym.inference.base import Sampling
from lmgym.inference.sampler import Sampler
from lmgym.rollouts.actor import Actor
from lmgym.rollouts.rollout import collect
from lmgym.types import Episode, Example
from tests.chat_families import FAMILIES, contexts, expected_before, forced
from tests.property.test_rendering import Script, ids_of

pytestmark = [
    pytest.mark.processes,
    pytest.mark.filterwarnings("ignore:the model's chat template leaves out"),  # ChatML's knows no tools
]
PROGRAM = str(Path(__file__).with_name("roaming_program.py"))
TEMPERATURE = 0.8
BOUND = 2e-5  # nats, in fp32


def sessions(actor: Actor, way: str, count: int, folder: Path, turns: int = 0, seed: int = 0) -> list[Episode]:
    """So many sessions of the program, of so many turns each."""
    prompts = [
        (place, Example(f"r/{seed}/{place}", "", meta={"note": str(folder / f"{seed}-{place}"), "turns": turns}))
        for place in range(count)
    ]
    envs = InProcess(lambda: AgentProgram(command=[sys.executable, PROGRAM, way]))
    try:
        return collect(prompts, actor, Sampling(max_new_tokens=8, temperature=TEMPERATURE), (seed, "roam"), envs)
    finally:
        envs.close()


def check_ids(tokenizer: Any, episode: Episode) -> None:
    """Each turn has read what transformers writes, around the tokens that were sampled."""
    assert not episode.error, episode.error
    requests = json.loads(Path(episode.example.meta["note"]).read_text())
    assert len(requests) == len(episode.turns)
    for request, before in zip(requests, contexts(episode), strict=True):
        assert before == expected_before(tokenizer, request, episode.turns)


def gaps(model: Any, episode: Episode) -> torch.Tensor:
    """The captured log-probabilities of all tokens less those of a teacher-forced pass."""
    own = torch.tensor([own for turn in episode.turns for own in turn.logprobs])
    return own - forced(model, episode, TEMPERATURE)


@pytest.mark.parametrize("family", FAMILIES)
def test_ids_and_log_probabilities_are_transformers_own(family: str, tmp_path: Path) -> None:
    policy = FAMILIES[family].policy()
    actor = Actor(Sampler(policy, 2), policy.tokenizer)  # fewer rows than sessions
    for episode in sessions(actor, "roams", 3, tmp_path, turns=6):
        check_ids(policy.tokenizer, episode)
        found = gaps(policy.model, episode)
        assert len(found) > 20 and float(found.abs().max()) < BOUND
        assert 1 < len(episode.rows()) < len(episode.turns)  # some turns go on, some fork


def told(family: str, way: str, answers: list[str], folder: Path) -> Episode:
    """A session in which the policy gives these answers, written with the family's control tokens."""
    tokenizer = FAMILIES[family].tokenizer()
    script = [[[*ids_of(text, tokenizer), tokenizer.eos_token_id] for text in answers]]
    [episode] = sessions(Actor(Script(script, [tokenizer.eos_token_id]), tokenizer), way, 1, folder)
    check_ids(tokenizer, episode)
    return episode


@pytest.mark.parametrize(
    ("family", "call"),
    [
        ("smollm2", '<tool_call>{"name": "add", "arguments": {"a": 3}}</tool_call>'),
        ("qwen", '<tool_call>\n{"name": "add", "arguments": {"a": 3}}\n</tool_call>'),
        ("llama 3", '{"name": "add", "parameters": {"a": 3}}'),
        ("mistral", '[TOOL_CALLS][{"name": "add", "arguments": {"a": 3}}]'),
    ],
)
def test_calls_and_their_results_stand_as_the_family_writes_them(family: str, call: str, tmp_path: Path) -> None:
    [row] = told(family, "calls", [call, "It is 3.", "Yes."], tmp_path).rows()
    assert len(row) == 3


def test_a_template_without_tools_costs_the_episode(tmp_path: Path) -> None:
    """Gemma 3's refuses results of tools: after a question comes an answer."""
    with pytest.raises(LmgymError, match="Conversation roles must alternate"):
        told("gemma", "calls", ['<tool_call>{"name": "add", "arguments": {"a": 3}}</tool_call>', "3"], tmp_path)


def test_thoughts_stay_unless_the_program_drops_them(tmp_path: Path) -> None:
    """Qwen's template drops thoughts of earlier answers. The session keeps what was sampled, and a program that drops
    them changes the past, which is a fork."""
    thought = "<think>\nTwo and two.\n</think>\n\n"
    first, second = told("qwen", "forgets", [f"{thought}4", "a", "b"], tmp_path).rows()
    tokenizer = FAMILIES["qwen"].tokenizer()
    written = [tokenizer.decode([id for turn in row for id in turn.prompt_ids]) for row in (first, second)]
    assert len(first) == 2 and "Two and two" not in written[1] and "assistant\n4<|im_end|>" in written[1]
    assert thought.strip() in tokenizer.decode(first[0].action_ids)
