"""Supervised training on all turns of a conversation: one row, whose tokens are a rollout's, and whose actions are the
assistant's texts with their ends and nothing else."""

from functools import partial

import pytest

from lmgym.algorithms.supervised import Supervised
from lmgym.batch import collate
from lmgym.core.errors import LmgymError
from lmgym.envs.base import Step
from lmgym.envs.stepwise import StepwiseEnv
from lmgym.inference.sampler import Sampler
from lmgym.models.load import load_policy
from lmgym.models.policy_section import PolicySection
from lmgym.rollouts.actor import Actor
from lmgym.rollouts.given_answers import given_turn, given_turns
from lmgym.rollouts.rollout import demonstrate
from lmgym.text.chat import prompt_ids
from lmgym.text.pictures import decoded
from lmgym.types import BarePrompt, Example
from tests import runs

SAID = [
    ("system", "Add."),
    ("user", "2+2="),
    ("assistant", "4"),
    ("user", "and 1?"),
    ("assistant", "5"),
    ("user", "ok?"),
]
MESSAGES = [{"role": role, "content": text} for role, text in SAID]
TEMPLATE = (
    "{% for m in messages %}[{{ m.role }}]{{ m.content }}{% if m.role == 'assistant' %}{{ eos_token }}{% endif %}\n"
    "{% endfor %}{% if add_generation_prompt %}[assistant]{% endif %}"
)


def actor(template: str | None, **changes: object) -> Actor:
    policy = load_policy(PolicySection(model="builtin:tiny", device="cpu", architecture=runs.ARCHITECTURE), seed=0)
    policy.tokenizer.chat_template = template
    return Actor(Sampler(policy), policy.tokenizer, **changes)  # type: ignore[arg-type]


def test_a_conversation_is_one_row_of_the_templates_own_tokens() -> None:
    own = actor(TEMPLATE)
    tokenizer, example = own.tokenizer, Example("a/0", MESSAGES, ("yes",))
    turns = given_turns(example, "yes", own)
    assert [turn.text for turn in turns] == ["4", "5", "yes"] and not any(turn.restart for turn in turns)
    ends = [tokenizer.decode(turn.action_ids, skip_special_tokens=False) for turn in turns]
    assert ends == [f"{text}{tokenizer.eos_token}" for text in ("4", "5", "yes")]
    row = [token for turn in turns for token in (*turn.prompt_ids, *turn.action_ids)]
    whole = tokenizer.apply_chat_template([*MESSAGES, {"role": "assistant", "content": "yes"}], tokenize=False)
    assert tokenizer.decode(row, skip_special_tokens=False) == whole.rstrip("\n")
    before = [*turns[0].prompt_ids, *turns[0].action_ids, *turns[1].prompt_ids]
    assert before == prompt_ids(tokenizer, MESSAGES[:4])  # what the policy would read at its second turn


def test_what_trains() -> None:
    own, example = actor(None), Example("a/0", MESSAGES, ("yes",))
    for every_turn, count in ((False, 1), (True, 3)):
        [episode] = demonstrate([(0, example)], own, (0,), every_turn=every_turn)
        assert len(episode.turns) == count and len(episode.rows()) == 1
        batch = Supervised().advantages(collate([episode]))
        assert int(batch.actions.sum()) == sum(len(turn.action_ids) for turn in episode.turns)
        assert batch.require("advantages").sum() == batch.actions.sum()
    assert Supervised(turns="all").requirements.every_turn and not Supervised().requirements.every_turn


def test_a_single_question_is_what_it_was() -> None:
    own, example = actor(TEMPLATE), Example("a/0", "2+2=", ("4",))
    assert given_turns(example, "4", own) == [given_turn(example, "4", own)]


@pytest.mark.parametrize(
    ("messages", "most", "said"),
    [
        ([*MESSAGES[:3], MESSAGES[2], MESSAGES[3]], None, "join two that follow each other"),
        (MESSAGES[2:], None, "something must stand before each message"),
        (MESSAGES[:5], None, "something must stand before each message"),
        (MESSAGES, 1, r"an earlier turn is longer than policy.max_reference_tokens \(1\)"),
    ],
)
def test_what_is_refused(messages: list[dict[str, str]], most: int | None, said: str) -> None:
    with pytest.raises(LmgymError, match=said):
        given_turns(Example("a/0", messages, ("yes",)), "yes", actor(TEMPLATE, reference_tokens=most))


THOUGHT = [("user", "2+2="), ("assistant", "<think>\nsum\n</think>4"), ("user", "and 1?")]
OPENED = TEMPLATE.replace("[assistant]{% endif %}", "[assistant]<think>\n{% endif %}")


class Asks:
    """Two questions, with the answers to imitate; the second in the same message, if it is `continued`."""

    def __init__(self, continued: bool = False) -> None:
        self.continued, self.turns = continued, 0

    def reset(self, example: Example, seed: int) -> list[dict[str, str]]:
        return [{"role": "user", "content": "2+2="}]

    def step(self, text: str, stop: str) -> Step:
        self.turns += 1
        if self.turns == 2:
            return Step(terminated=True)
        return Step(continuation=" <think>\n") if self.continued else Step([{"role": "user", "content": "and 1?"}])

    def demonstrate(self) -> str:
        return "<think>\nfive\n</think>5"


@pytest.mark.parametrize(("template", "start"), [(OPENED, ""), (TEMPLATE, "<think>\n"), (None, "<think>\n")])
def test_what_is_written_already_is_trained_in_no_turn(template: str | None, start: str) -> None:
    """What the template, or policy.answer_start, writes before every answer: as of the first, so of the later ones."""
    own = actor(template, answer_start=start)
    messages = [{"role": role, "content": text} for role, text in THOUGHT]
    [played] = demonstrate([(0, Example("a/0", "2+2="))], own, (0,), Asks)
    given = given_turns(Example("a/0", messages), "<think>\nfive\n</think>5", own)
    for turns, first in ((given, "sum\n</think>4"), (played.turns, "five\n</think>5")):
        said = [own.tokenizer.decode(turn.action_ids, skip_special_tokens=False) for turn in turns]
        assert said == [text + own.tokenizer.eos_token for text in (first, "five\n</think>5")]
        shown = own.tokenizer.decode(turns[1].prompt_ids, skip_special_tokens=False)
        assert shown.endswith("<think>\n") and shown.count("<think>") == 1


@pytest.mark.parametrize(("template", "start"), [(OPENED, ""), (TEMPLATE, "<think>\n")])
def test_a_line_that_is_written_already_is_no_turn(template: str, start: str) -> None:
    example = Example("a/0", "2+2=", ("<think>\nsum\n</think>4",))
    with pytest.raises(LmgymError, match=r"example a/0: the turn '<think>\\n' is no action, as the chat template"):
        demonstrate([(0, example)], actor(template, answer_start=start), (0,), StepwiseEnv)


def test_what_an_environment_has_put_into_the_message_is_not_taken_away() -> None:
    [episode] = demonstrate([(0, Example("a/0", "2+2="))], actor(OPENED), (0,), partial(Asks, continued=True))
    assert episode.rows() == [episode.turns]
    assert decoded(actor(OPENED).tokenizer, episode.turns[1].action_ids).startswith("<think>\nfive")


def test_behind_a_bare_prompt_an_answer_ends_with_the_end_of_sequence() -> None:
    """And not with the mark of the chat template, which nothing of it goes through."""
    own = actor(TEMPLATE.replace("{{ eos_token }}", "<|im_end|>"))
    own.tokenizer.add_special_tokens({"additional_special_tokens": ["<|im_end|>"]})
    example = Example("a/0", BarePrompt("2+2="), ("2+2 is\n#### 4",))
    [episode] = demonstrate([(0, example)], own, (0,), StepwiseEnv)
    ends = [turn.action_ids[-1] for turn in (episode.turns[-1], given_turn(example, "4", own))]
    assert len(episode.turns) == 2 and ends == [own.tokenizer.eos_token_id] * 2
