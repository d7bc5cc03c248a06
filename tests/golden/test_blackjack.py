"""The exact return of Blackjack-v1 that the benchmark reports, against published numbers and gymnasium's own play."""

import gymnasium
import numpy as np
import pytest

from benchmarks.blackjack import best_return, dealer, expected_return


def test_known_returns() -> None:
    """Of random play, sticking at 17 and the best play, as others have computed them for these rules."""
    assert expected_return(lambda state: 0.5) == pytest.approx(-0.396, abs=5e-4)
    assert expected_return(lambda state: float(state[0] < 17)) == pytest.approx(-0.079, abs=5e-4)
    assert best_return() == pytest.approx(-0.0466, abs=5e-5)


def test_the_dealer_ends_somewhere() -> None:
    for total, ace in ((10, False), (11, True), (6, False)):
        ends = dealer(total, ace)
        assert sum(ends.values()) == pytest.approx(1.0) and set(ends) <= {17, 18, 19, 20, 21, 22}


def test_it_is_what_gymnasium_pays() -> None:
    """A policy of no special sense, 4,000 games: the mean lies within four standard errors."""

    def hits(state: tuple[int, int, int]) -> float:
        return float((3 * state[0] + state[1] + 5 * state[2]) % 7 < 3)

    env, rewards = gymnasium.make("Blackjack-v1"), []
    for seed in range(4000):
        observation, _ = env.reset(seed=seed)
        over = False
        while not over:
            total, shown, ace = (int(number) for number in observation)
            observation, reward, over, _, _ = env.step(int(hits((total, shown, ace))))
        rewards.append(float(reward))
    error = np.std(rewards) / np.sqrt(len(rewards))
    assert abs(np.mean(rewards) - expected_return(hits)) < 4 * error
