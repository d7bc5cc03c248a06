"""A thousand turns at the gateway under the chat templates of five families, beside plain transformers.

    python -m tests.torture turns                                  # tiny models of each architecture
    python -m tests.torture.turns --turns 100 --model FOLDER       # a real model, with its own template

All captured ids must be those of transformers' own rendering around the sampled tokens. The log-probabilities are
compared with a teacher-forced pass over each turn's whole row: for the tiny models within 2e-5 nats. Of a real one the
same pass is taken in fp64 as well, so that one sees how much of the difference is transformers' own rounding.
"""

import argparse
import copy
import tempfile
import time
import warnings
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from lmgym.inference.sampler import Sampler
from lmgym.models.policy import Policy
from lmgym.rollouts.actor import Actor
from tests.chat_families import FAMILIES, forced
from tests.models import in_double
from tests.parity.test_chat_families import BOUND, TEMPERATURE, check_ids, gaps, sessions

EACH = 10  # turns of a session


def main(arguments: list[str]) -> int:
    """A thousand turns of the five families, or as the options say."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--turns", type=int, default=1000, help="in all")
    parser.add_argument("--model", help="a folder with a model that has a chat template, in place of the tiny ones")
    options = parser.parse_args(arguments)
    warnings.filterwarnings("ignore", "the model's chat template leaves out")
    if options.model:
        model = AutoModelForCausalLM.from_pretrained(options.model, dtype=torch.float32)
        policies = {options.model: Policy(model, AutoTokenizer.from_pretrained(options.model))}
    else:
        policies = {name: family.policy() for name, family in FAMILIES.items()}
    failed = 0
    for name, policy in policies.items():
        began = time.monotonic()
        found = torch.cat(played(policy, -(-options.turns // (EACH * len(policies))), own=bool(options.model)))
        worst, root = found.abs().amax(0), found.square().mean(0).sqrt()
        print(f"{name}: {len(found)} tokens, {time.monotonic() - began:.0f} s; largest and rms difference in nats:")
        for place, beside in enumerate(
            ("gateway - transformers", "gateway - fp64", "transformers - fp64")[: len(worst)]
        ):
            print(f"    {beside:24} {worst[place]:.1e} {root[place]:.1e}", flush=True)
        failed += not options.model and float(worst[0]) >= BOUND
    return int(failed > 0)


def played(policy: Policy, count: int, own: bool) -> list[torch.Tensor]:
    """Differences of so many sessions: one column, or three with fp64 (of a model of one's own)."""
    exact = in_double(copy.deepcopy(policy.model)) if own else None
    found = []
    with tempfile.TemporaryDirectory() as folder:
        for seed in range(count):
            actor = Actor(Sampler(policy, 4), policy.tokenizer)
            [episode] = sessions(actor, "roams", 1, Path(folder), turns=EACH, seed=seed)
            check_ids(policy.tokenizer, episode)
            columns = [gaps(policy.model, episode)]
            if exact is not None:
                columns += beside(exact, episode, columns[0])
            found.append(torch.stack(columns, 1))
    return found


def beside(exact: Any, episode: Any, gap: torch.Tensor) -> list[torch.Tensor]:
    """The gateway's log-probabilities, and transformers' own in fp32, less those in fp64. `gap`: of these two."""
    own = torch.tensor([one for turn in episode.turns for one in turn.logprobs], dtype=torch.float64)
    truth = forced(exact, episode, TEMPERATURE)
    return [own - truth, own - gap - truth]


if __name__ == "__main__":
    import sys

    sys.exit(main(sys.argv[1:]))
