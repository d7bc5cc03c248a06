"""What an algorithm asks to be collected and filled in before its loss is computed."""

from dataclasses import dataclass
from typing import Literal

from lmgym.core.errors import LmgymError
from lmgym.core.registry import suggest
from lmgym.functional.distribution_sums import SUMS
from lmgym.functional.divergences import Divergence


@dataclass(frozen=True)
class ServedTeacher:
    """A teacher behind an endpoint, asked for its `top_k` most likely tokens (inference/served_teacher.py). `seconds`
    is the limit of one request, `concurrency` how many run at a time.

    Example: ServedTeacher(address="http://localhost:8000/v1", top_k=20)"""

    address: str
    top_k: int
    model: str | None = None
    key_variable: str | None = None
    seconds: float = 600.0
    concurrency: int = 8


@dataclass(frozen=True)
class Rival:
    """One more answer to each prompt, by the policy and its copy as the stage began, mixed token by token: in
    proportion to policy^(1 - share) copy^share. `trains`: it joins its group, as the last; else only its score counts,
    as `batch.baseline`.

    Example: Rival(share=1.0, trains=True)  # the copy alone"""

    share: float
    trains: bool = False


@dataclass(frozen=True, kw_only=True)
class Requirements:
    """What a stage must provide besides the answers and their log-probabilities at sampling time."""

    answers: str = "policy"
    """What is trained on, by the name of its source (rollouts/sources.py): answers that the policy samples ("policy"),
    or what the examples give: "references", "rated" answers, or answers in labelled "steps"."""
    every_turn: bool = False
    """answers: references: the assistant's messages in a prompt are imitated too, as turns of one row."""
    pairs: bool = False
    """Of rated answers: two to a prompt, of different ratings."""
    separator: str = ""
    """What ends each step of an answer in steps."""
    makes: Literal["policy", "reward_model", "process_reward_model"] = "policy"
    """What the stage trains: a policy, or a model that scores answers or their steps, which then is what the run
    writes."""
    reward: bool | Literal["optional"] = True
    """A stage that samples must name a reward, unless its environment pays. False: the algorithm learns from none;
    optional: it learns from those that there are."""
    reference: bool = False
    """`batch.logprobs_ref`: log-probabilities by a frozen copy of the policy."""
    teacher: str | None = None
    """`batch.logprobs_teacher`: log-probabilities by this model (Hub id, folder or built-in name); or by the policy as
    it is at each step ("self") or was when the stage began ("initial")."""
    served_teacher: ServedTeacher | None = None
    """In place of `teacher`, `batch.teacher_top`: the most likely tokens of a model behind an endpoint."""
    divergence: Divergence | None = None
    """`new.divergence`, in place of `batch.logprobs_teacher`: how far each distribution of the policy is from the
    teacher's. For a `loss` under the first-order driver; not together with `entropy`."""
    hint: str | None = None
    """How the prompt reads that the teacher gets in place of the policy's own (rollouts/hints.py)."""
    mask: bool = False
    """A frozen copy of the policy that decides which tokens may be sampled (`Algorithm.restriction`)."""
    values: bool = False
    """A value function: `batch.values`, `batch.last_values`, `new.values`, and in `batch_loss` `new.last_values`."""
    greedy: bool = False
    """`batch.baseline`: the score of the greedy answer to the same prompt."""
    rival: Rival | None = None
    """One more answer to each prompt, sampled by another policy (training/beside.py)."""
    given_share: float = 0.0
    """answers: policy: the share of the prompts whose texts are references all the same; drawn by the seed."""
    old_logprobs: bool = False
    """`batch.logprobs_old` before the first optimizer step, by a pass of its own; later steps have it in any case."""
    distribution_sums: tuple[str, ...] = ()
    """`batch.distribution_sum(name)` for these names (functional/distribution_sums.py): numbers of the whole
    distribution at each action; and `batch.logprobs_old`, by the same pass."""
    entropy: bool = False
    """`new.entropy`: the exact entropy of each distribution."""
    reward_components: bool = False
    """`batch.reward_components`: each part of the score before its weight."""

    def __post_init__(self) -> None:
        """Raise LmgymError for a sum that does not exist."""
        for name in self.distribution_sums:
            if name not in SUMS:
                raise LmgymError(f"requirements.distribution_sums: there is no '{name}'; {suggest(name, SUMS)}")

    @property
    def makes_policy(self) -> bool:
        """True if the stage trains a policy, and not a model that scores answers."""
        return self.makes == "policy"
