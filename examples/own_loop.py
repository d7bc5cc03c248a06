"""A loop and an environment of your own: reset, act, step, buffer, update. lmgym's parts, none of its loop.

    python examples/own_loop.py              # about a minute on one slow core
    python examples/own_loop.py --steps 5

The game: find a secret digit from 0 to 7 in three guesses; after each wrong one the environment says "higher" or
"lower". Blind guessing finds it in 37 of 100 games, halving the interval in 87. The player is a Llama of 0.8 million
random parameters that reads and writes bytes: at first it hardly ever writes a digit.
"""

import argparse
import random

from lmgym import GRPO, Episode, Example, Sampler, Sampling, Step, Turn, collate, load_policy, seeds
from lmgym.engines.base import Request
from lmgym.policies.load import PolicySection
from lmgym.update import Optimizer, OptimizerSection, prepare

GUESSES, DIGITS = 3, 8
SAMPLING = Sampling(temperature=1.0, max_new_tokens=1)  # a guess is one byte


class HigherOrLower:
    """One game. Text in, text out; it knows nothing of tokens, models or training."""

    def reset(self, example: Example, seed: int) -> str:
        self.secret, self.left = random.Random(seed).randrange(DIGITS), GUESSES
        return "?"

    def step(self, text: str) -> Step:
        self.left -= 1
        if not (text.isdecimal() and int(text) < DIGITS):
            return Step(terminated=True)  # not a guess: the game is lost
        if int(text) == self.secret:
            return Step(reward=1.0, terminated=True)
        if self.left == 0:
            return Step(reward=0.1, terminated=True)
        hint = "higher" if int(text) < self.secret else "lower"
        return Step(messages=[{"role": "user", "content": f" {hint}?"}])


def play(engine: Sampler, tokenizer, games: int, group: int, key: int, version: int) -> list[Episode]:
    """Play games side by side. What the player sampled is kept as ids, with their log-probabilities; what the
    environment says is tokenized once and put behind them."""

    def encode(text: str) -> list[int]:
        return tokenizer(text, add_special_tokens=False)["input_ids"]

    envs, buffer, ids, fresh = [], [], [], []
    for place in range(games):
        envs.append(HigherOrLower())
        example = Example(id=f"game/{place // group}", prompt="?")  # games of one group have the same secret
        text = envs[-1].reset(example, seeds.key(place // group, parent=key))
        buffer.append(Episode(example, group=place // group, index=place, version=version))
        fresh.append([tokenizer.bos_token_id, *encode(text)])
        ids.append(list(fresh[-1]))
    live = list(range(games))
    while live:
        requests = [Request(tuple(ids[n]), seeds.key(n, len(buffer[n].turns), parent=key)) for n in live]
        still = []
        for n, answer in zip(live, engine.generate(requests, SAMPLING), strict=True):
            text = tokenizer.decode(answer.ids, skip_special_tokens=True)
            outcome = envs[n].step(text)
            turn = Turn(fresh[n], answer.ids, answer.logprobs, text, stop=answer.stop, reward=outcome.reward)
            buffer[n].turns.append(turn)
            buffer[n].score += outcome.reward
            if not outcome.terminated:
                fresh[n] = encode(outcome.messages[0]["content"])
                ids[n] += [*answer.ids, *fresh[n]]
                still.append(n)
        live = still
    return buffer


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=150)
    parser.add_argument("--seed", type=int, default=0)
    given = parser.parse_args()

    policy = load_policy(PolicySection(model="builtin:tiny", device="cpu"), given.seed)
    engine = Sampler(policy)
    algorithm = GRPO(group_size=8)
    optimizer = Optimizer(policy.parameters(), OptimizerSection(learning_rate=1e-3))
    for step in range(given.steps):
        # act: 32 secrets, 8 games each
        buffer = play(engine, policy.tokenizer, 256, algorithm.group_size, seeds.key(given.seed, "game", step), step)
        # update: episodes to tensors, advantages, one optimizer step
        batch = collate(buffer, policy.pad_id, SAMPLING.temperature, policy.stop_ids)
        batch = prepare(batch, policy, {}, algorithm)
        optimizer.set_step(step, given.steps)
        metrics = algorithm.update(policy, batch, optimizer)
        engine.load(policy, step + 1)  # from here on it answers with the new weights
        if step % 10 == 9 or step == given.steps - 1:
            found = sum(episode.score >= 1 for episode in buffer) / len(buffer)
            print(
                f"step {step + 1:>4}  found {found:.2f}  score {float(batch.score.mean()):.2f}  "
                f"turns {sum(len(episode.turns) for episode in buffer) / len(buffer):.2f}  "
                f"gradient {metrics['gradient_norm']:.2f}",
                flush=True,
            )


if __name__ == "__main__":
    main()
