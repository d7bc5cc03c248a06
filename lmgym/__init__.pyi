"""The public names with their types, for type checkers and editors; __init__.py gives them when they are used.

tests/contract/test_typed_names.py compares the two.
"""

from lmgym.algorithms.actor_critic import A2C as A2C
from lmgym.algorithms.actor_critic import PPO as PPO
from lmgym.algorithms.base import Algorithm as Algorithm
from lmgym.algorithms.distill import Distill as Distill
from lmgym.algorithms.dpo import DPO as DPO
from lmgym.algorithms.gkd import GKD as GKD
from lmgym.algorithms.grpo.algorithm import GRPO as GRPO
from lmgym.algorithms.grpo.correction import Correction as Correction
from lmgym.algorithms.grpo.credit import Credit as Credit
from lmgym.algorithms.grpo.group_relative import GroupRelative as GroupRelative
from lmgym.algorithms.grpo.surrogate import Surrogate as Surrogate
from lmgym.algorithms.grpo.tokens import Tokens as Tokens
from lmgym.algorithms.kto import KTO as KTO
from lmgym.algorithms.nash_md import NashMD as NashMD
from lmgym.algorithms.nlpo import NLPO as NLPO
from lmgym.algorithms.online_dpo import OnlineDPO as OnlineDPO
from lmgym.algorithms.orpo import ORPO as ORPO
from lmgym.algorithms.process_reward_model import ProcessRewardModel as ProcessRewardModel
from lmgym.algorithms.raft import RAFT as RAFT
from lmgym.algorithms.reinforce import RLOO as RLOO
from lmgym.algorithms.reinforce import Reinforce as Reinforce
from lmgym.algorithms.replay import Replay as Replay
from lmgym.algorithms.reward_model import RewardModel as RewardModel
from lmgym.algorithms.supervised import Supervised as Supervised
from lmgym.algorithms.trpo import TRPO as TRPO
from lmgym.algorithms.xpo import XPO as XPO
from lmgym.batch import Batch as Batch
from lmgym.batch import PolicyOutputs as PolicyOutputs
from lmgym.batch import collate as collate
from lmgym.config.build import load_config as load_config
from lmgym.config.schema import Config as Config
from lmgym.config.schema import Stage as Stage
from lmgym.core.errors import LmgymError as LmgymError
from lmgym.core.registry import register as register
from lmgym.envs.agent import Agent as Agent
from lmgym.envs.base import Env as Env
from lmgym.envs.base import Step as Step
from lmgym.envs.check import check_env as check_env
from lmgym.inference.base import Request as Request
from lmgym.inference.base import Sampling as Sampling
from lmgym.inference.sampler import Sampler as Sampler
from lmgym.logs.sinks import Sink as Sink
from lmgym.models.load import load_policy as load_policy
from lmgym.models.policy import Policy as Policy
from lmgym.models.policy_section import PolicySection as PolicySection
from lmgym.rewards.check import check_reward as check_reward
from lmgym.rollouts.evaluate import evaluate as evaluate
from lmgym.rollouts.rollout import apply_rewards as apply_rewards
from lmgym.rollouts.rollout import collect as collect
from lmgym.rollouts.rollout import demonstrate as demonstrate
from lmgym.tasks.base import check_task as check_task
from lmgym.training.algorithm_check import check_algorithm as check_algorithm
from lmgym.training.begin_stage import begin_stage as begin_stage
from lmgym.training.callbacks import Callback as Callback
from lmgym.training.evaluation_points import finish as finish
from lmgym.training.loop import (
    advance as advance,
)
from lmgym.training.loop import (
    begin_step as begin_step,
)
from lmgym.training.loop import (
    collate_step as collate_step,
)
from lmgym.training.loop import (
    end_stage as end_stage,
)
from lmgym.training.loop import (
    evaluate_and_save_when_due as evaluate_and_save_when_due,
)
from lmgym.training.loop import (
    evaluate_before as evaluate_before,
)
from lmgym.training.loop import (
    gather as gather,
)
from lmgym.training.loop import (
    log_step as log_step,
)
from lmgym.training.loop import (
    stages_left as stages_left,
)
from lmgym.training.loop import (
    train as train,
)
from lmgym.training.setup import start as start
from lmgym.training.stage_checkpoint import save_checkpoint as save_checkpoint
from lmgym.training.tracing import begin_trace as begin_trace
from lmgym.types import (
    Episode as Episode,
)
from lmgym.types import (
    Example as Example,
)
from lmgym.types import (
    LabelledStep as LabelledStep,
)
from lmgym.types import (
    RatedAnswer as RatedAnswer,
)
from lmgym.types import (
    Turn as Turn,
)
from lmgym.updates.optimizer import OptimizerSection as OptimizerSection
from lmgym.updates.optimizer import make_optimizer as make_optimizer
from lmgym.updates.prepare import prepare as prepare
from lmgym.updates.update import update as update

__version__: str
__all__: list[str]
