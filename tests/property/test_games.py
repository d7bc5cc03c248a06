"""Games of several players: each side has its own conversation and its own episode, and what it is paid is its own."""

import itertools
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from gymnasium import spaces
from hypothesis import given
from hypothesis import strategies as st

from lmgym.algorithms.requirements import Requirements
from lmgym.batch import collate
from lmgym.core.errors import LmgymError
from lmgym.envs.base import Step
from lmgym.envs.check import check_env
from lmgym.envs.conversation import Conversation
from lmgym.envs.env_processes import EnvProcesses
from lmgym.envs.games import LINES, GuessNumber, TicTacToe
from lmgym.envs.pettingzoo import PettingZoo
from lmgym.envs.vector import InProcess
from lmgym.inference.base import Sampling
from lmgym.inference.sampler import Sampler
from lmgym.models.builtin import number_tokenizer
from lmgym.models.policy import Policy
from lmgym.rollouts.actor import Actor
from lmgym.rollouts.evaluate import evaluate, measured
from lmgym.rollouts.play import Draw, played_by_all, who_moved
from lmgym.rollouts.rollout import collect, demonstrate, groups_of
from lmgym.text.chat import decode
from lmgym.training.beside import one_answer
from lmgym.training.loop import mark_selected
from lmgym.training.unjudged import refuse_unjudged, usable_groups
from lmgym.types import Episode, Example, Turn
from tests import models, runs

NUMBERS = number_tokenizer()
GAME = Example("game/0", "a game")


def policy() -> Policy:
    model = models.sharpen(models.llama(vocab_size=len(NUMBERS), max_position_embeddings=256), 0.18)
    model.generation_config.eos_token_id = NUMBERS.eos_token_id
    return Policy(model, NUMBERS)


class Moves(Policy):
    """A policy of nothing but moves, from `lowest` to 9: the game goes on for a while."""

    lowest = 1

    def head(self, hidden: Any, narrow: bool = False) -> Any:
        logits = super().head(hidden, narrow)
        keep = logits[..., 3 + self.lowest : 13].clone()
        return logits.fill_(-1e9).slice_scatter(keep, -1, 3 + self.lowest, 13)


def player(lowest: int = 1) -> Actor:
    one = Moves(policy().model, NUMBERS)
    one.lowest = lowest
    return Actor(Sampler(one, 8), NUMBERS)


def played(envs: Any, opponent: Actor | None = None, games: int = 12) -> list[Episode]:
    actor = player()
    actor = Actor(actor.engine, NUMBERS, opponent=opponent)
    prompts = [(place // 2, Example(f"game/{place // 2}", "a game")) for place in range(games)]
    return collect(prompts, actor, Sampling(max_new_tokens=1), (0, "games"), envs)


class Zeros(Policy):
    """A policy that says 0, which is no move."""

    def head(self, hidden: Any, narrow: bool = False) -> Any:
        logits = super().head(hidden, narrow)
        return logits.fill_(-1e9).index_fill(-1, logits.new_tensor([3]).long(), 0.0)


def against(opponent: str) -> InProcess:
    return InProcess(lambda: TicTacToe(opponent=opponent, style="numbers"))  # type: ignore[arg-type]


def test_both_sides_of_a_game_are_episodes_of_their_own() -> None:
    episodes = played(against("self"))
    assert [episode.index for episode in episodes] == list(range(24))
    assert all(len(group) == 2 for group in groups_of(episodes))
    results = []
    for first, second in zip(episodes[::2], episodes[1::2], strict=True):
        assert first.example is second.example and second.group == first.group + 1
        assert len(first.turns) - len(second.turns) in (0, 1)
        board = [0] * 9
        pairs = itertools.zip_longest(first.turns, second.turns)
        turns = [turn for pair in pairs for turn in pair if turn is not None]
        for number, turn in enumerate(turns):
            own, other = number % 2 + 1, 2 - number % 2
            seen = " ".join(str({0: 0, own: 1, other: 2}[field]) for field in board)
            assert NUMBERS.decode(turn.prompt_ids, skip_special_tokens=True) == seen
            move = int(turn.text) - 1
            if board[move]:
                assert turn is turns[-1] and turn.reward == -1 and sum(t.reward for t in turns) == -1
                results.append("illegal")
                break
            board[move] = own
        else:
            won = any(board[a] and board[a] == board[b] == board[c] for a, b, c in LINES)
            assert (first.score, second.score) == ((1, -1) if len(turns) % 2 else (-1, 1)) if won else (0, 0)
            results.append("won" if won else "draw")
    assert {"illegal", "won"} <= set(results)


@pytest.mark.slow
@pytest.mark.processes
def test_sides_in_other_processes_are_the_same() -> None:
    workers = EnvProcesses("tic_tac_toe", {"style": "numbers"}, count=2)
    try:
        one, other = played(against("self")), played(workers)
    finally:
        workers.close()
    assert [[t.action_ids for t in e.turns] + [e.score, e.group] for e in one] == [
        [t.action_ids for t in e.turns] + [e.score, e.group] for e in other
    ]


class Letters(Policy):
    """A policy of nothing but the letters from `first` on, four of them."""

    first = "a"

    def head(self, hidden: Any, narrow: bool = False) -> Any:
        logits = super().head(hidden, narrow)
        start = self.tokenizer.convert_tokens_to_ids(self.first)
        keep = logits[..., start : start + 4].clone()
        return logits.fill_(-1e9).slice_scatter(keep, -1, start, start + 4)


@pytest.mark.slow
def test_a_model_that_plays_the_user_is_read_and_does_not_train() -> None:
    def speaks(first: str, seed: int, opponent: Actor | None = None) -> Actor:
        policy = Letters(models.llama(seed), models.tokenizer())
        policy.first = first
        return Actor(Sampler(policy, 4), policy.tokenizer, opponent=opponent)

    actor = speaks("a", 0, opponent=speaks("w", 1))
    envs = InProcess(lambda: Conversation(user="frozen", max_turns=3, user_prompt="{prompt}"))  # type: ignore[arg-type]
    prompts = [(place, Example(f"talk/{place}", f"{place}?")) for place in range(6)]
    until = Sampling(max_new_tokens=30, min_new_tokens=2, stop=("d", "z"))
    played = collect(prompts, actor, until, (0, "talk"), envs)
    assert [len(episode.turns) for episode in played] == [3] * 6
    heard = set()
    for episode in played:
        read = [decode(actor.tokenizer, turn.prompt_ids) for turn in episode.turns]
        assert read[0] == episode.example.prompt
        assert all(set(turn.text) <= set("abcd") for turn in episode.turns)
        assert all(set(text.strip()) <= set("wxyz") and text for text in read[1:])
        heard |= set(read[1:])
    assert len(heard) > 6  # he answers what was said to him
    own = Actor(actor.engine, actor.tokenizer)
    with_himself = collect(prompts, own, until, (0, "talk"), envs)
    assert all(set(decode(own.tokenizer, e.turns[1].prompt_ids).strip()) <= set("abcd") for e in with_himself)


@pytest.mark.parametrize("opponent", ["current", "frozen"])
def test_what_the_other_side_says_does_not_train(opponent: str) -> None:
    other = player(lowest=7) if opponent == "frozen" else None
    episodes = played(against(opponent), other, games=16)
    assert len(episodes) == 16
    firsts = [" ".join("0" * 9) in NUMBERS.decode(e.turns[0].prompt_ids) for e in episodes if e.turns]
    assert any(firsts) and not all(firsts)  # sides are drawn
    batch = collate([episode for episode in episodes if episode.turns])
    ours = sum(len(turn.action_ids) for episode in episodes for turn in episode.turns)
    assert int(batch.actions.sum()) == ours
    if other is not None:  # and it is another player that speaks
        same = played(against("current"), None, games=16)
        assert [e.turns for e in same] != [e.turns for e in episodes]


@pytest.mark.parametrize("opponent", ["self", "current"])
def test_a_player_who_never_moved_is_no_answer_of_an_evaluation(opponent: str) -> None:
    """Each first move is none, so each game is over then. The groups keep their places, since models are compared by
    them."""
    actor = Actor(Sampler(Zeros(policy().model, NUMBERS), 8), NUMBERS)
    games = [Example(f"game/{place}", "a game") for place in range(12)]
    found = evaluate(games, actor, Sampling(max_new_tokens=1), [], against(opponent))
    moved = who_moved(found.episodes)
    assert len(found.episodes) == (24 if opponent == "self" else 12) > len(moved) > 0
    for name, mean in {"reward": -1.0, "length/mean": 1.0}.items():
        assert (found.results[name].mean, found.results[name].count) == (mean, len(moved))
    assert [len(own) for own in measured(groups_of(found.episodes), [])["reward"]] == [
        len(one.turns) for one in found.episodes
    ]


def test_a_player_who_never_moved_is_no_answer_of_a_step(tmp_path: Path) -> None:
    changes: dict[str, Any] = {"task": None, "rewards": {}, "steps": 1, "logs": {"rollouts": "all"}}
    changes |= {"algorithm": {"name": "grpo", "group_size": 2}, "sampling": {"max_new_tokens": 1}}
    run = runs.run(tmp_path / "run", env={"name": "tic_tac_toe", "style": "numbers"}, prompts_per_step=8, **changes)
    [record] = (one for one in runs.records(run / "metrics.jsonl") if one["kind"] == "train")
    played = runs.records(run / "rollouts.jsonl")
    assert all(answer["turns"] for answer in played)
    answers = [answer for answer in played if answer["kind"] == "train"]
    assert record["answers"] == len(answers) < 32
    assert record["reward"] == pytest.approx(sum(answer["score"] for answer in answers) / len(answers))


def test_a_game_that_was_over_before_a_move_is_no_baseline() -> None:
    actor = Actor(Sampler(Zeros(policy().model, NUMBERS), 8), NUMBERS)
    prompts = [(place, Example(f"game/{place}", "a game")) for place in range(12)]
    draw = Draw(prompts, (0, "games"), actor, Sampling(max_new_tokens=1), against("current"))
    episodes = played_by_all(draw)
    answers = one_answer(episodes, replace(draw, key=(0, "greedy")), {})
    assert [one.baseline for one in episodes] == [-1.0 if answer.turns else None for answer in answers]
    assert {one.baseline for one in episodes} == {-1.0, None}


def test_an_answer_that_is_brought_back_is_in_no_group_of_the_step() -> None:
    """Groups of games have no numbers in a row: some players have never moved, and a later draw begins anew."""
    groups = [[Episode(GAME, group, 0, [Turn([1], [4])])] for group in (0, 2, 3)]
    brought = Episode(GAME, 0, 0, [Turn([1], [4])])
    assert [one.group for one in mark_selected(groups, [*groups, [brought]])] == [0, 2, 3, 4]


def test_games_without_a_move_of_the_side_that_trains() -> None:
    idle = Episode(GAME, 0, 0)
    with pytest.raises(LmgymError, match="step 3: each of its 2 games was over before the side that trains had a move"):
        refuse_unjudged([[idle], [idle]], 2)
    moved, failed = Episode(GAME, 0, 1, [Turn([1], [4])]), Episode(GAME, 0, 2, error="down")
    assert usable_groups([[idle, moved, failed], [idle]], Requirements(reward=False)) == [[moved]]


def test_demonstrators_play_whole_games() -> None:
    prompts = [(place, Example(f"game/{place}", "a game")) for place in range(40)]
    episodes = demonstrate(prompts, player(), (0, "games"), against("self"))
    assert len(episodes) == 80 and not any(episode.error for episode in episodes)
    scores = [episode.score for episode in episodes]
    assert sum(scores) == 0 and {1.0, -1.0} <= set(scores)


class Unfair:
    """Names players that there are not."""

    players = 2

    def __init__(self, step: Step) -> None:
        self.answer = step

    def reset(self, example: Example, seed: int) -> str:
        return "1"

    def step(self, text: str, stop: str) -> Step:
        return self.answer


@pytest.mark.parametrize(
    ("step", "problem"),
    [
        (Step([{"role": "user", "content": "2"}], player=2), "names player 2 as the next, and there are 2"),
        (Step(terminated=True, others={1: 1.0}), "pays player 1, who has not played; there are 2"),
        (Step(terminated=True, others={1: float("nan")}), "pays the others"),
    ],
)
def test_players_that_there_are_not(step: Step, problem: str) -> None:
    with pytest.raises(LmgymError, match=problem):
        played(InProcess(lambda: Unfair(step)), games=1)


class Pairs:
    """A game in PettingZoo's form with actions of two numbers, whose info has entries of names that `show` knows."""

    def __init__(self, **info: Any) -> None:
        self.possible_agents, self.agent_selection = ["a", "b"], "a"
        self.info = {"observation": "their own", "player": "someone", **info}

    def action_space(self, name: str) -> Any:
        return spaces.MultiDiscrete([2, 2])

    def observation_space(self, name: str) -> Any:
        return spaces.Discrete(9)

    def reset(self, seed: int) -> None:
        self.agents = [*self.possible_agents]

    def last(self) -> Any:
        return 3, 0, False, False, self.info


def test_entries_of_the_info_do_not_hide_what_is_shown() -> None:
    game: dict[str, Any] = {"id": "tests.property.test_games:Pairs", "show": "{player}|{observation}|{actions}"}
    with pytest.raises(LmgymError, match=r"env.show: the actions of MultiDiscrete\(.*\) cannot be listed"):
        PettingZoo(**game).reset(GAME, seed=0)
    listed = PettingZoo(**game, arguments={"actions": "two numbers"})
    assert listed.reset(GAME, seed=0)[-1]["content"] == "a|3\n|two numbers"


@pytest.mark.parametrize("line", LINES)
def test_three_in_a_row_win(line: Sequence[int]) -> None:
    env = TicTacToe()
    env.reset(GAME, 0)
    others = [field for field in range(9) if field not in line]
    second = next(pair for pair in itertools.combinations(others, 2))
    steps = [env.step(str(move + 1), "eos") for move in (line[0], second[0], line[1], second[1], line[2])]
    assert [step.over for step in steps] == [False] * 4 + [True]
    assert steps[-1].reward == 1.0 and steps[-1].others == {1: -1.0}
    assert [step.player for step in steps[:4]] == [1, 0, 1, 0]


def test_a_full_board_is_a_draw() -> None:
    env = TicTacToe()
    env.reset(GAME, 0)
    steps = [env.step(move, "eos") for move in "123546879"]
    assert [step.over for step in steps] == [False] * 8 + [True]
    assert (steps[-1].reward, dict(steps[-1].others)) == (0.0, {1: -0.0})


def test_a_range_needs_two_numbers() -> None:
    assert GuessNumber(low=3, high=4).high == 4
    with pytest.raises(LmgymError, match=r"env\.low is 3 and env\.high 3; the range needs two numbers at least"):
        GuessNumber(low=3, high=3)


@given(st.integers(0, 2**63), st.integers(0, 50), st.integers(1, 200))
def test_halving_finds_every_number(seed: int, low: int, size: int) -> None:
    env = GuessNumber(low=low, high=low + size, guesses=(size + 1).bit_length())
    env.reset(GAME, seed)
    for _ in range((size + 1).bit_length()):
        step = env.step(env.demonstrate(), "eos")
        if step.over:
            break
    assert step.reward == 1.0


@pytest.mark.parametrize("text", ["", "10", "0", "x", "5 ", "\u0665", "5.0", "-5", "1" * 5000, "\u00b2"])
def test_what_is_no_move_loses(text: str) -> None:
    env = TicTacToe()
    env.reset(GAME, 0)
    step = env.step(text, "eos")
    assert step.terminated == (text.strip() != "5") and step.reward == (0.0 if text.strip() == "5" else -1.0)


@pytest.mark.parametrize(
    ("name", "arguments"),
    [
        ("single_turn", {}),
        ("guess_number", {}),
        *[("tic_tac_toe", {"opponent": opponent}) for opponent in ("self", "current", "frozen", "random")],
        ("gymnasium", {"id": "Blackjack-v1", "agent": "blackjack", "on_invalid": "random"}),
        ("gymnasium", {"id": "CartPole-v1", "on_invalid": "retry"}),
        ("stepwise", {"calculator": True}),
        ("conversation", {"tools": ["calculator"]}),
    ],
)
def test_built_in_environments_keep_their_contract(name: str, arguments: dict[str, Any]) -> None:
    check_env(name, **arguments)
    check_env(name, texts=["1", "5", "9", "3", "7", "2"], seed=3, **arguments)


class Leaky:
    """LLM_RL's bug: what it returns is what it goes on with."""

    def reset(self, example: Example, seed: int) -> Any:
        self.messages = [{"role": "user", "content": "go"}]
        return self.messages

    def step(self, text: str, stop: str) -> Step:
        self.messages.append({"role": "user", "content": "on"})
        return Step(self.messages) if len(self.messages) < 4 else Step(terminated=True)


class Moody:
    """Another one each time."""

    count = 0

    def reset(self, example: Example, seed: int) -> str:
        Moody.count += 1
        return f"go {Moody.count}"

    def step(self, text: str, stop: str) -> Step:
        return Step(terminated=True)


class Picky(Moody):
    """Raises at a text that it does not expect."""

    def reset(self, example: Example, seed: int) -> str:
        return "go"

    def step(self, text: str, stop: str) -> Step:
        return Step(reward=float(text), terminated=True)


@pytest.mark.parametrize(
    ("env", "problem"),
    [
        (Leaky, "what it returned in reset was changed later; return a copy"),
        (Moody, "two of one seed differ in reset"),
        (Picky, "failed in step 1 .*ValueError: could not convert string to float"),
    ],
)
def test_check_env_finds(env: Any, problem: str) -> None:
    with pytest.raises(LmgymError, match=problem):
        check_env(env)


def test_a_greedy_baseline_wants_one_player(tmp_path: Path) -> None:
    with pytest.raises(LmgymError, match="a game of several players has none of its own"):
        runs.run(
            tmp_path / "run",
            task=None,
            rewards={},
            env={"name": "tic_tac_toe"},
            algorithm={"name": "reinforce", "baseline": "scst"},
        )
