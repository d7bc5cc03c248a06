"""`check_algorithm`: tests the contract of an algorithm. For users who write their own."""

import copy
import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace

import torch
from torch import Tensor

from lmgym.algorithms.base import Algorithm
from lmgym.batch import Batch, collate
from lmgym.core import seeds
from lmgym.core.errors import LmgymError, describe
from lmgym.models import copies
from lmgym.models.critic import with_critic
from lmgym.models.load import load_policy
from lmgym.models.policy import Policy
from lmgym.models.policy_section import PolicySection
from lmgym.types import Episode, Example, Turn
from lmgym.updates.checks import checked_batch, checked_numbers
from lmgym.updates.first_order import optimizer_step
from lmgym.updates.optimizer import Optimizer, OptimizerSection
from lmgym.updates.prepare import prepare

# Two orders of a sum of n fp32 terms differ by up to n machine epsilons of their size. A gradient of the tiny model
# here is a sum over some hundred tokens and some thousand products: 8192 * 2^-23, relative to the gradient's norm.
TOLERANCE = 8192 * 2.0**-23
ARCHITECTURE = {
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "max_position_embeddings": 64,
}
GROUPS, LONGEST = 4, 7  # prompts; tokens of an answer


def check_algorithm(algorithm: Algorithm) -> str:
    """Say what was checked of an algorithm. Raises LmgymError, with one sentence, if it breaks its contract. Use it in
    the tests of your own ones.

    Tried on a tiny model with answers to four prompts: the gradient of an optimizer step is the same if the batch is
    computed row by row, if its rows come in another order, if more padding is added and if it is computed twice (up to
    TOLERANCE of its norm), and finite; no method changes the batch that it is given; after `state_dict`, through JSON,
    and `load_state_dict` into a new copy it is the same again. Algorithms of a driver of their own only get the last
    two.

    Example:
        >>> check_algorithm(MyAlgorithm(group_size=4))
        "MyAlgorithm keeps its contract for 16 answers to 4 prompts: the gradient is the same ..."
    """
    name = type(algorithm).__name__
    policy = load_policy(PolicySection(device="cpu", compute="float32", architecture=ARCHITECTURE))
    for parameter in policy.parameters():  # as made, the model finds all tokens about equally likely
        parameter.data *= 3.0
    if algorithm.requirements.values:
        policy = with_critic(policy, separate=False)
    frozen = {key: _other(policy) for key in ("reference", "teacher")}
    policy = policy.but(teacher=frozen["teacher"])
    episodes = sample_episodes(max(algorithm.group_size, 2), policy)

    components = {"reward": 1.0} if algorithm.requirements.reward_components else None
    collated = collate(episodes, policy.pad_id, stop_ids=policy.stop_ids, limit=LONGEST, weights=components)
    with _untouched(name, collated):
        batch = prepare(collated, policy, frozen, algorithm)
    _check_finite(f"{name}.advantages gives", batch.advantages)
    with _untouched(name, batch):
        copy.deepcopy(algorithm).advantages(batch)
    tried = dict[str, tuple[Policy, Batch]]()
    if algorithm.driver == Algorithm.driver:
        with _untouched(name, batch):
            usual = gradient_of(algorithm, policy, batch)
        _check_finite(f"{name}: the loss has", usual, "a gradient that is not finite")
        order = torch.arange(len(batch) - 1, -1, -1)
        tried = {
            "computed a second time": (policy, batch),
            "computed row by row": (policy.but(tokens_per_forward=1), batch),
            "with its rows in another order": (policy, batch[order]),
            "with more padding": (policy, _padded(batch)),
        }
        for how, (own, other) in tried.items():
            _compare(name, how, usual, gradient_of(algorithm, own, other))
    _check_state(algorithm, batch)
    kept = "the batch that it is given stays as it was, and a copy that loads its state is the same again"
    tried_too = f"the gradient is the same {', '.join(tried)}; " if tried else ""
    untried = "" if tried else f" (its driver, {algorithm.driver}, is not tried)"
    return f"{name} keeps its contract for {len(episodes)} answers to {GROUPS} prompts: {tried_too}{kept}{untried}"


def sample_episodes(group_size: int, policy: Policy) -> list[Episode]:
    """Answers of different lengths to `GROUPS` prompts, with rewards that differ within each group; some are cut off.
    Functions of their place alone. Log-probabilities are those of the policy."""
    special = {*policy.special_ids, *policy.never}
    ordinary = [token for token in range(policy.vocabulary) if token not in special]
    episodes = []
    for index in range(GROUPS * group_size):
        draws = seeds.uniforms([seeds.key("check", "algorithm", index)], 0, LONGEST + 2)[0]
        ids = [ordinary[int(draw * len(ordinary))] for draw in draws[2 : 3 + int(draws[0] * LONGEST)]]
        group, ended = index // group_size, len(ids) < LONGEST
        turn = Turn([5 + group, 6, 7], ids + [policy.stop_ids[0]] * ended, stop="eos" if ended else "length")
        turn.reward = round(float(draws[1]), 2)
        one = Episode(Example(f"check/{group}", "?"), group, index, [turn], terminated=ended, score=turn.reward)
        one.reward_components, one.baseline = {"reward": turn.reward}, 0.5
        episodes.append(one)
    said = policy.compute_logprobs_no_grad(collate(episodes, policy.pad_id)).logprobs
    for row, one in enumerate(episodes):
        [turn] = one.turns
        turn.logprobs = said[row, 3 : 3 + len(turn.action_ids)].tolist()
    return episodes


class _Keep(Optimizer):
    """Keeps the gradient as one vector and moves nothing."""

    def step(self) -> float:
        gradients = [torch.zeros_like(p) if p.grad is None else p.grad for p in self.parameters]
        self.gradient = torch.cat([gradient.flatten() for gradient in gradients])
        self.zero_grad()
        return float(self.gradient.norm())


def gradient_of(algorithm: Algorithm, policy: Policy, batch: Batch) -> Tensor:
    """The gradient of a later optimizer step on a prepared batch, for which the old log-probabilities have drifted."""
    old = batch.logprobs_sampler
    assert old is not None
    batch = batch.replace(logprobs_old=old + 0.2 * torch.sin(100 * old) * batch.actions)
    keep = _Keep(policy.parameters(), OptimizerSection(), policy.critic_parameters())
    algorithm = copy.deepcopy(algorithm)
    minibatch = checked_batch(algorithm, "before_minibatch", algorithm.before_minibatch(batch))
    optimizer_step(algorithm, policy, minibatch, keep, first=False)
    checked_numbers(algorithm, "metrics", algorithm.metrics(batch))
    return getattr(keep, "gradient", torch.zeros(1))


def _other(policy: Policy) -> Policy:
    """A frozen model that finds other tokens likely than the policy does."""
    other = copies.frozen(policy)
    for parameter in other.model.parameters():
        parameter.data *= 0.9
    return other


def _padded(batch: Batch) -> Batch:
    """More columns on the right, whose numbers mean nothing."""
    wide = {}
    for name, column in vars(batch).items():
        if isinstance(column, Tensor) and column.dim() >= 2 and name != "reward_components":
            right = (*[0, 0] * (column.dim() - 2), 0, 3)
            wide[name] = torch.nn.functional.pad(column, right, value=0 if column.dtype == torch.bool else 3)
    return batch.replace(**wide)


def _compare(name: str, how: str, usual: Tensor, other: Tensor) -> None:
    size = max(float(usual.norm()), float(other.norm()))
    if size and float((usual - other).norm()) > TOLERANCE * size:
        difference = float((usual - other).norm()) / size
        raise LmgymError(
            f"{name}: the gradient of a batch {how} differs by {difference:.2g} of its norm; what a row's loss depends "
            "on must be in its own row, in the columns that `advantages` fills in, or in `batch_loss`"
        )


def _check_finite(who: str, numbers: Tensor | None, what: str = "advantages that are not finite") -> None:
    """NaN equals nothing, so no other check would say what is wrong with it."""
    if numbers is not None and not bool(torch.isfinite(numbers).all()):
        raise LmgymError(f"{who} {what} for the tiny model's answers; look for a division by zero or a log of zero")


@contextmanager
def _untouched(algorithm: str, batch: Batch) -> Iterator[None]:
    """The methods get a batch and give another one; in the body they must not write into its columns."""
    before = {name: column.clone() for name, column in vars(batch).items() if isinstance(column, Tensor)}
    yield
    for name, column in before.items():
        if not torch.equal(column, getattr(batch, name)):
            raise LmgymError(f"{algorithm} writes into the column '{name}' of its batch; replace it")


def _check_state(algorithm: Algorithm, batch: Batch) -> None:
    """What `state_dict` returns must be JSON, and make a new copy give the same credit."""
    name = type(algorithm).__name__
    returned = algorithm.state_dict()
    if not isinstance(returned, Mapping):
        raise LmgymError(
            f"{name}.state_dict() returned a {type(returned).__name__}; return a dictionary, {{}} for none"
        )
    try:
        state = json.loads(json.dumps(returned, allow_nan=False))
    except (TypeError, ValueError) as error:
        raise LmgymError(f"{name}.state_dict() is no plain JSON ({error})") from error
    resumed = replace(algorithm)
    try:
        resumed.load_state_dict(state)
    except (KeyError, TypeError) as error:
        raise LmgymError(
            f"{name}.load_state_dict does not take what state_dict returned ({describe(error)}); a subclass returns "
            "what super().state_dict() has, too"
        ) from error
    same = json.loads(json.dumps(resumed.state_dict())) == state
    ours, theirs = (copy.deepcopy(one).advantages(batch).advantages for one in (algorithm, resumed))
    if not same or (ours is not None and (theirs is None or not torch.equal(ours, theirs))):
        raise LmgymError(f"{name}: load_state_dict does not take over all that state_dict returned")
