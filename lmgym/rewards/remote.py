"""`remote_reward`: a reward server as OpenRLHF has it, which gets rendered prompts and answers."""

import json
import math
from collections.abc import Mapping

from lmgym.core.endpoint import Endpoint, ask, check_address, start_of
from lmgym.core.errors import LmgymError
from lmgym.core.registry import register
from lmgym.rewards.base import episodes as of_episodes
from lmgym.rewards.foreign.openrlhf import lists_of, rewards_in
from lmgym.types import Episode


@register("reward", "remote_reward")
@of_episodes
def remote_reward(
    episodes: list[Episode], *, url: str, seconds: float = 180.0, retries: int = 4, wait: float = 1.0
) -> list[float]:
    """What OpenRLHF's reward server (`--remote_rm_url`) says of each answer.

    One request with `query` (prompt and answer as the model has read and written them), `prompts` and `labels` for all
    answers; the reply is a JSON object with the list `rewards`, and perhaps `scores` and `extra_logs`, which are
    recorded. A request may take `seconds` and is repeated `retries` times, first after `wait` seconds.

    Example: remote_reward(episodes, url="http://localhost:5000/get_reward") -> [0.7, -0.2]"""
    owner = "reward 'remote_reward'"
    check_address(url, "key 'rewards.remote_reward.url'")
    if not (0 < seconds < math.inf and 0 <= wait < math.inf and retries >= 0):
        raise LmgymError("key 'rewards.remote_reward': seconds must be above 0, wait and retries at least 0")
    if not episodes:
        return []
    server = Endpoint(owner, url, "", None, {}, seconds, retries, wait)
    lists = lists_of(episodes)
    reply = ask(server, "", {"query": lists["queries"], "prompts": lists["prompts"], "labels": lists["labels"]})
    try:
        found = json.loads(reply)
    except (ValueError, RecursionError):
        found = None
    if not isinstance(found, Mapping) or "rewards" not in found:
        raise LmgymError(f"{owner}: the reply of {url} is no JSON object with 'rewards': {start_of(server, reply)!r}")
    return rewards_in(found, episodes, "remote_reward")


remote_reward.reads_sequence = "tokens"  # type: ignore[attr-defined]
remote_reward.limits_itself = True  # type: ignore[attr-defined]  # the request has its own time limit
