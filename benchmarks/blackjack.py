"""lmgym/recipes/blackjack.yaml by seeds, and the exact return of what each has learned.

    python -m benchmarks.blackjack --seeds 20 21 22

Blackjack-v1 deals from an endless deck, and a policy that sees only the observation is a table of 280 states, so what
it earns is computed and not estimated: `expected_return` goes through the player's hands and the dealer's.
"""

import argparse
import time
from collections.abc import Callable, Mapping
from functools import cache
from pathlib import Path

from benchmarks.training import train

CARDS = {card: (4 if card == 10 else 1) / 13 for card in range(1, 11)}
STICK, HIT = 0, 1
State = tuple[int, int, int]  # the player's sum, the dealer's card, whether an ace counts 11


def add(total: int, ace: bool, card: int) -> tuple[int, bool]:
    """A hand with one more card: its best sum, and whether an ace counts 11 in it."""
    total, ace = total + card, ace
    if card == 1 and total + 10 <= 21 and not ace:
        return total + 10, True
    if total > 21 and ace:
        return total - 10, False
    return total, ace


@cache
def dealer(total: int, ace: bool) -> Mapping[int, float]:
    """How the dealer's hand ends: sum -> probability; above 21 is 22. He draws below 17 and stands on all 17s."""
    if total > 21:
        return {22: 1.0}
    if total >= 17:
        return {total: 1.0}
    ends: dict[int, float] = {}
    for card, chance in CARDS.items():
        for end, then in dealer(*add(total, ace, card)).items():
            ends[end] = ends.get(end, 0.0) + chance * then
    return ends


def stick(total: int, shown: int) -> float:
    """What standing earns: 1, 0 or -1 as the player's sum is above, equal to or below the dealer's."""
    ends = dealer(*add(0, False, shown))
    return sum(chance * ((end > 21 or total > end) - (end <= 21 and end > total)) for end, chance in ends.items())


def expected_return(hits: Callable[[State], float]) -> float:
    """The mean reward of a game of Blackjack-v1 (natural: false, sab: false) for a policy that hits with the given
    probability in each state.

    Example:
        >>> round(expected_return(lambda state: 0.5), 3)
        -0.396
    """

    @cache
    def value(total: int, shown: int, ace: bool) -> float:
        chance = hits((total, shown, int(ace)))
        return chance * _hit(value, total, shown, ace) + (1 - chance) * stick(total, shown)

    return _of_a_deal(value)


def best_return() -> float:
    """The most that any policy earns.

    Example:
        >>> round(best_return(), 4)
        -0.0466
    """

    @cache
    def value(total: int, shown: int, ace: bool) -> float:
        return max(_hit(value, total, shown, ace), stick(total, shown))

    return _of_a_deal(value)


Value = Callable[[int, int, bool], float]


def _hit(value: Value, total: int, shown: int, ace: bool) -> float:
    """What one more card earns, with `value` of each hand that it may lead to."""
    hands = [(chance, add(total, ace, card)) for card, chance in CARDS.items()]
    return sum(chance * (-1.0 if sum_ > 21 else value(sum_, shown, own)) for chance, (sum_, own) in hands)


def _of_a_deal(value: Value) -> float:
    """The mean of the values over the cards that are dealt."""
    return sum(
        p * q * r * value(*_swapped(add(*add(0, False, first), second), shown))
        for first, p in CARDS.items()
        for second, q in CARDS.items()
        for shown, r in CARDS.items()
    )


def _swapped(hand: tuple[int, bool], shown: int) -> tuple[int, int, bool]:
    return hand[0], shown, hand[1]


def greedy_table(folder: Path) -> dict[State, float]:
    """What a trained run's policy does in each state: 1 hit, 0 stick. Another answer than these is counted as a hit,
    the worse of the two where it matters most."""
    import torch

    from lmgym.config.build import load_config
    from lmgym.inference.base import Request, Sampling
    from lmgym.inference.in_process import make_engine
    from lmgym.text.chat import decode, prompt_ids
    from lmgym.training.setup import trained_policy

    torch.set_num_threads(1)
    config = load_config(folder / "recipe.yaml")
    policy = trained_policy(config, folder)
    states = [(total, shown, ace) for total in range(4, 22) for shown in range(1, 11) for ace in (0, 1)]
    prompts = [prompt_ids(policy.tokenizer, " ".join(map(str, state)) + "\n") for state in states]
    requests = [Request(tuple(ids), key) for key, ids in enumerate(prompts)]
    answers = make_engine(config.engine, policy).generate(requests, Sampling(temperature=0.0, max_new_tokens=1))
    said = [decode(policy.tokenizer, answer.ids).strip() for answer in answers]
    return {state: 0.0 if text == "0" else 1.0 for state, text in zip(states, said, strict=True)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--seeds", type=int, nargs="+", default=[20, 21, 22])
    parser.add_argument("--out", type=Path, default=Path("runs/blackjack"))
    parser.add_argument("overrides", nargs="*", help="key=value, as for lmgym train")
    given = parser.parse_args()
    print(f"stick at 17 {expected_return(lambda s: float(s[0] < 17)):.4f}, at best {best_return():.4f}", flush=True)
    for seed in given.seeds:
        folder, began = given.out / f"seed{seed}", time.perf_counter()
        train("lmgym/recipes/blackjack.yaml", [f"seed={seed}", f"out={folder}", *given.overrides])
        seconds = time.perf_counter() - began
        table = greedy_table(folder)
        print(f"seed {seed}: {expected_return(lambda s, t=table: t[s]):.4f} after {seconds:.0f} s", flush=True)


if __name__ == "__main__":
    main()
