"""The value function of a policy: a linear head on the policy's own hidden states, or a separate model with a head."""

from torch import Tensor, nn

from lmgym.distributed.parts import mesh_of
from lmgym.models import copies
from lmgym.models.policy import Policy
from lmgym.models.rounding import RoundedWeights
from lmgym.models.sharding import shard_module, shard_policy


def value_head(size: int, like: Tensor) -> nn.Linear:
    """A linear map without bias from a hidden state [size] to its value [1] (as in RL4LMs). Its weights are zero, so it
    predicts 0 at first. Device and dtype are those of `like`."""
    head = nn.Linear(size, 1, bias=False, device=like.device, dtype=like.dtype)
    nn.init.zeros_(head.weight)
    return head


def with_critic(policy: Policy, separate: bool) -> Policy:
    """The policy with a value function; itself if it has one already (from an earlier stage or a checkpoint).

    separate=False: a value head on the policy's own hidden states. separate=True: a trainable copy of the model with a
    value head of its own, in `policy.critic`.

    Example:
        >>> with_critic(policy, separate=False).compute_logprobs(batch, values=True).values
    """
    if policy.has_critic:
        return policy
    if separate:
        critic = with_critic(copies.trainable(policy), separate=False)
        if policy.rounded is not None:
            critic = critic.but(rounded=RoundedWeights(critic.model, policy.rounded.seed))
        return policy.but(critic=critic if policy.skeleton is None else shard_policy(critic, policy.ranks))
    # Preferably like a parameter that trains: the weights of a quantized base are packed, its adapters are not.
    like = next(iter([*policy.parameters(), *policy.model.parameters()]))
    head = value_head(policy.hidden_size, like)
    if policy.skeleton is not None:
        shard_module(head, mesh_of(policy.ranks, policy.device.type))
    return policy.but(value_head=head)
