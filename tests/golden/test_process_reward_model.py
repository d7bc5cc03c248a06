"""A process reward model's loss and gradient: those of transformers' token classifier, which TRL's PRMTrainer trained
(TRL 1.16 has that trainer no more), by hand, and the same for any cut, order and padding. Also where steps end."""

import math
from typing import Any

import pytest
import torch
from torch import Tensor

from lmgym.algorithms.process_reward_model import ProcessRewardModel, step_logits
from lmgym.batch import Batch, PolicyOutputs
from lmgym.core.errors import LmgymError
from lmgym.functional.steps import first_wrong, step_ends, values_after
from lmgym.models.policy import Policy
from lmgym.models.reward_model import as_reward_model
from lmgym.rollouts.actor import Actor
from lmgym.rollouts.given_answers import labelled_steps
from lmgym.text.steps import split_steps, step_ids
from lmgym.types import Example, LabelledStep
from tests import models

ANSWERS = [
    ("2+2+1=", [("2+2=4", True), ("4+1=6", False), ("6", False)]),
    ("7=", [("7", True)]),
    ("2+2+1=", [("2+2=5", False), ("5+1=6", True)]),
    ("1+1=", [(" 2 ", True), ("So it is 2.", True)]),
]
EXAMPLES = [
    Example(f"a/{n}", prompt, steps=tuple(LabelledStep(*step) for step in steps))
    for n, (prompt, steps) in enumerate(ANSWERS)
]
# Gradients by way of columns in fp32: about a hundred terms, each rounded once.
TOLERANCE = 256 * 2.0**-23


def policy_of(kind: str, exact: bool = True) -> Policy:
    policy = Policy({"llama": models.llama, "gpt2": models.gpt2}[kind](), models.tokenizer())
    return models.with_value_head(models.exact(policy) if exact else policy)


def batch_of(policy: Policy, examples: list[Example] = EXAMPLES, separator: str = "\n") -> Batch:
    return models.batch_of(labelled_steps(list(enumerate(examples)), Actor(None, policy.tokenizer), separator))


def by_transformers(policy: Policy) -> tuple[float, Tensor]:
    """The loss of PRMTrainer, and its gradient by the trunk: rows of BOS, prompt, and each step with its separator,
    labels at the last token of each separator, mean of the cross-entropies of two outputs."""
    tokenizer, rows = policy.tokenizer, []
    for prompt, steps in ANSWERS:
        ids = [tokenizer.bos_token_id, *tokenizer(prompt, add_special_tokens=False)["input_ids"]]
        labels = [-100] * len(ids)
        for text, right in steps:
            own = tokenizer(text.strip(), add_special_tokens=False)["input_ids"]
            own += tokenizer("\n", add_special_tokens=False)["input_ids"]
            ids, labels = ids + own, labels + [-100] * (len(own) - 1) + [int(right)]
        rows.append((ids, labels))
    width = max(len(ids) for ids, _ in rows)
    columns = [
        torch.tensor([[*row[n], *[filler] * (width - len(row[n]))] for row in rows])
        for n, filler in ((0, 0), (1, -100))
    ]
    mask = torch.tensor([[1] * len(ids) + [0] * (width - len(ids)) for ids, _ in rows])
    classifier = as_reward_model(policy, "process_reward_model").double()
    for parameter in policy.parameters():
        parameter.grad = None
    loss = classifier(input_ids=columns[0], attention_mask=mask, labels=columns[1]).loss
    loss.backward()
    return float(loss.detach()), trunk_gradient(policy)


def trunk_gradient(policy: Policy) -> Tensor:
    """Without the LM head's, which a classifier lacks."""
    own = policy.model.base_model.parameters()
    return torch.cat([(torch.zeros_like(p) if p.grad is None else p.grad).flatten() for p in own])


@pytest.mark.parametrize("kind", ["llama", "gpt2"])
def test_loss_and_gradient_are_those_of_transformers_token_classifier(kind: str) -> None:
    policy = policy_of(kind)
    theirs, wanted = by_transformers(policy)
    _, metrics = models.gradient(ProcessRewardModel(), policy, batch_of(policy), first=True)
    assert metrics["loss/steps"] == pytest.approx(theirs, rel=TOLERANCE)
    assert float(wanted.norm()) > 0.01 and models.relative(trunk_gradient(policy), wanted) < TOLERANCE


def widened(batch: Batch) -> Batch:
    """Three more columns that mean nothing."""
    columns: dict[str, Any] = {}
    for name, column in vars(batch).items():
        if isinstance(column, Tensor) and column.dim() == 2:
            columns[name] = torch.nn.functional.pad(column, (0, 3), value=0 if column.dtype == torch.bool else 3)
    return batch.replace(**columns)


@pytest.mark.parametrize("fast", [True, False])
def test_cut_order_and_padding_do_not_matter(fast: bool) -> None:
    policy = policy_of("llama")
    policy.fast = fast
    batch, algorithm = batch_of(policy), ProcessRewardModel()
    usual, metrics = models.gradient(algorithm, policy, batch)
    policy.tokens_per_forward = 1
    for other in (batch, batch[torch.tensor([2, 3, 1, 0])], widened(batch)):
        found, same = models.gradient(algorithm, policy, other)
        assert models.relative(found, usual) < TOLERANCE
        assert same["loss/steps"] == pytest.approx(metrics["loss/steps"], rel=TOLERANCE)
        assert same["step/accuracy"] == metrics["step/accuracy"] and same["step/right"] == 5 / 8


def test_worked_values() -> None:
    """Two rows of steps of 2 and 1 tokens, and of one; logits 1, -2 and 3, labels right, right, wrong."""
    actions = torch.tensor([[False, True, True, True], [False, True, False, False]])
    turn = torch.tensor([[0, 0, 0, 1], [0, 0, 0, 0]])
    values = torch.tensor([[0.0, 9.0, 9.0, 1.0], [0.0, 9.0, 0.0, 0.0]])
    rewards = torch.tensor([[0.0, 0.0, 1.0, 1.0], [0.0, 0.0, 0.0, 0.0]])
    assert step_ends(actions, turn).nonzero().tolist() == [[0, 2], [0, 3], [1, 1]]
    after = values_after(values, torch.tensor([-2.0, 3.0]), actions)
    assert after[actions].tolist() == [9.0, 1.0, -2.0, 3.0]
    zeros = torch.zeros(2)
    batch = Batch(turn.clone(), actions, actions, rewards, zeros, zeros, zeros, zeros, zeros > 0, turn=turn)
    outputs = PolicyOutputs(zeros[:, None], values=values, last_values=torch.tensor([-2.0, 3.0]))
    logits, labels = step_logits(batch, outputs)
    assert logits.tolist() == [1.0, -2.0, 3.0] and labels.tolist() == [1.0, 1.0, 0.0]
    losses, metrics = ProcessRewardModel().batch_loss(batch, outputs)
    wanted = (math.log1p(math.exp(-1)) + math.log1p(math.exp(2)) + math.log1p(math.exp(3))) / 3
    assert float(losses["steps"]) == pytest.approx(wanted, rel=1e-6)
    assert metrics == {"step/accuracy": 1 / 3, "step/right": 2 / 3}
    right, answer = torch.tensor([True, False, False, True]), torch.tensor([4, 4, 4, 7])
    assert first_wrong(right, answer).tolist() == [1, -1]


def test_steps_and_their_tokens() -> None:
    """A separator that the recipe writes may be a control token; what a step spells is none."""
    tokenizer = models.tokenizer()
    assert split_steps(" 1+1=2\n\n \n2*2=4 \n", "\n") == ["1+1=2", "2*2=4"] and split_steps(" \n", "\n") == []
    line = tokenizer("\n", add_special_tokens=False)["input_ids"]
    assert step_ids(tokenizer, " 7 ", "\n") == [*tokenizer("7", add_special_tokens=False)["input_ids"], *line]
    end = tokenizer.eos_token
    assert step_ids(tokenizer, "7", end)[-1] == tokenizer.eos_token_id
    assert tokenizer.eos_token_id not in step_ids(tokenizer, f"7{end}", "\n")


def test_an_answer_in_steps_is_one_row() -> None:
    policy = policy_of("llama")
    episode = labelled_steps([(3, EXAMPLES[0])], Actor(None, policy.tokenizer), "\n")[0]
    assert episode.text == "2+2=4\n4+1=6\n6" and [turn.reward for turn in episode.turns] == [1.0, 0.0, 0.0]
    assert len(episode.rows()) == 1 and policy.tokenizer.eos_token_id not in episode.turns[-1].action_ids


@pytest.mark.parametrize(
    ("steps", "said"),
    [
        ((), "example a/0 has no labelled steps to learn from; the task step_labels reads them"),
        ((LabelledStep(" ", True),), "example a/0 has an empty step"),
        ((LabelledStep("2\n2", True),), r"example a/0: the step '2\\n2' holds the separator '\\n'; choose another one"),
    ],
)
def test_steps_that_cannot_be(steps: tuple[LabelledStep, ...], said: str) -> None:
    with pytest.raises(LmgymError, match=said):
        labelled_steps([(0, Example("a/0", "?", steps=steps))], Actor(None, models.tokenizer()), "\n")
    with pytest.raises(LmgymError, match=r"algorithm\.separator is empty"):
        ProcessRewardModel(separator="")
