"""A loop and an environment of your own: reset, act, step, buffer, update. lmgym's parts, none of its loop.

    python examples/own_loop.py              # under a minute on one slow core
    python examples/own_loop.py --steps 5

The game: find a secret digit from 0 to 7 in three guesses; after a wrong one the environment says "higher" or "lower".
Guessing blindly finds it in 3 of 8 games, halving the interval in 7 of 8. The player is a Llama of 0.4 million random
parameters that reads and writes bytes: at first it hardly ever writes a digit.
"""

import argparse
import random
from dataclasses import dataclass
from typing import Any

from lmgym import GRPO, Episode, Example, Sampler, Sampling, Step, Turn, collate, load_policy
from lmgym.core import seeds
from lmgym.inference.base import Request
from lmgym.models.load import PolicySection
from lmgym.updates.optimizer import OptimizerSection, make_optimizer
from lmgym.updates.prepare import prepare
from lmgym.updates.update import update

DIGITS, GUESSES = 8, 3
SECRETS, GROUP = 32, 8  # games in a step: 32 secrets, 8 times each; GRPO compares the games of one secret
SAMPLING = Sampling(temperature=1.0, max_new_tokens=1)  # a guess is one byte


class HigherOrLower:
    """The environment. Text in, text out: it knows nothing of tokens, models or training."""

    def reset(self, seed: int) -> str:
        self.secret, self.left = random.Random(seed).randrange(DIGITS), GUESSES
        return "?"

    def step(self, text: str) -> Step:
        self.left -= 1
        if not (text.isdecimal() and int(text) < DIGITS):
            return Step(terminated=True)  # no guess at all: the game is lost
        if int(text) == self.secret:
            return Step(reward=1.0, terminated=True)
        if self.left == 0:
            return Step(reward=0.1, terminated=True)
        return Step(messages=[{"role": "user", "content": " higher?" if int(text) < self.secret else " lower?"}])


@dataclass
class Game:
    """One episode on its way. What was sampled stays as ids and is never tokenized again."""

    env: HigherOrLower
    episode: Episode
    key: int  # its random numbers
    ids: list[int]  # everything so far: what the policy reads
    fresh: list[int]  # the part of it that no turn holds yet


def reset(tokenizer: Any, key: int, version: int) -> list[Game]:
    """The games of a step, each before its first guess."""
    games = []
    for place in range(SECRETS * GROUP):
        group, env = place // GROUP, HigherOrLower()
        text = env.reset(seeds.key(group, parent=key))
        episode = Episode(Example(f"game/{group}", text), group=group, index=place, version=version)
        ids = [tokenizer.bos_token_id, *tokenizer(text, add_special_tokens=False)["input_ids"]]
        games.append(Game(env, episode, seeds.key("sampling", place, parent=key), ids, list(ids)))
    return games


def act_and_step(games: list[Game], engine: Sampler, tokenizer: Any) -> list[Game]:
    """One guess in each game, answered by its environment; the games that go on."""
    requests = [Request(tuple(game.ids), seeds.key(len(game.ids), parent=game.key)) for game in games]
    for game, answer in zip(games, engine.generate(requests, SAMPLING), strict=True):
        text = tokenizer.decode(answer.ids, skip_special_tokens=True)
        outcome = game.env.step(text)
        turn = Turn(game.fresh, answer.ids, answer.logprobs, text, answer.stop, reward=outcome.reward)
        game.episode.turns.append(turn)
        game.episode.score += outcome.reward
        said = "".join(message["content"] for message in outcome.messages)  # nothing where the game is over
        game.fresh = tokenizer(said, add_special_tokens=False)["input_ids"]
        game.ids = [*game.ids, *answer.ids, *game.fresh]
    return [game for game in games if game.fresh]


def main() -> None:
    parser = argparse.ArgumentParser(description="A tiny Llama learns to find a secret digit.")
    parser.add_argument("--steps", type=int, default=80)
    parser.add_argument("--seed", type=int, default=0)
    given = parser.parse_args()

    section = PolicySection(model="builtin:tiny", architecture={"num_hidden_layers": 2}, device="cpu")
    policy = load_policy(section, given.seed)
    engine, algorithm = Sampler(policy), GRPO(group_size=GROUP, minibatches=4)
    optimizer = make_optimizer(algorithm, policy, OptimizerSection(learning_rate=1e-3))
    for step in range(given.steps):
        key = seeds.key(given.seed, "step", step)
        games = live = reset(policy.tokenizer, key, version=step)
        while live:
            live = act_and_step(live, engine, policy.tokenizer)
        buffer = [game.episode for game in games]  # plain Python objects: look into them, filter them, keep them
        batch = collate(buffer, policy.pad_id, SAMPLING.temperature, policy.stop_ids, key)  # and from here on tensors
        batch = prepare(batch, policy, {}, algorithm)  # old log-probabilities, advantages
        optimizer.set_step(step, given.steps)
        metrics = update(algorithm, policy, batch, optimizer)  # four optimizer steps, on a quarter of the games each
        engine.load(policy, step + 1)  # the next guesses are the new policy's
        if step % 10 == 9 or step == given.steps - 1:
            found = sum(episode.score >= 1 for episode in buffer) / len(buffer)
            guesses = sum(len(episode.turns) for episode in buffer) / len(buffer)
            gradient, clipped = metrics["gradient_norm"], metrics["ratio/clipped"]
            print(
                f"step {step + 1:>4}  found {found:.2f}  guesses {guesses:.2f}  gradient {gradient:.2f}  "
                f"clipped {clipped:.1%}",
                flush=True,
            )


if __name__ == "__main__":
    main()
