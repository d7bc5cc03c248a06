"""Random numbers: functions of their path and of nothing else."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from lmgym.core import seeds

keys = st.integers(0, 2**64 - 1)
parts = st.lists(st.one_of(st.integers(0, 2**63), st.text(max_size=6)), min_size=1, max_size=5)


def test_uniforms_are_splitmix64() -> None:
    """The generator's published outputs for seed 1234567 (Vigna's C code; also in Rosetta Code and Java's tests)."""
    published = [
        6457827717110365317,
        3203168211198807973,
        9817491932198370423,
        4593380528125082431,
        16408922859458223821,
    ]
    assert seeds.uniforms([1234567], 0, 5)[0].tolist() == [(word >> 11) * 2.0**-53 for word in published]


@given(keys=st.lists(keys, min_size=1, max_size=5), start=st.integers(0, 10_000), count=st.integers(1, 40))
def test_uniforms_depend_on_key_and_position_only(keys: list[int], start: int, count: int) -> None:
    block = seeds.uniforms(keys, start, count)
    assert block.shape == (len(keys), count)
    assert block.dtype == np.float64
    assert float(block.min()) >= 0
    assert float(block.max()) < 1
    for row, key in enumerate(keys):
        assert block[row].tolist() == seeds.uniforms([key], 0, start + count)[0, start:].tolist()


@given(keys)
def test_uniforms_look_uniform(key: int) -> None:
    """4,096 numbers: mean 1/2, variance 1/12, neighbours uncorrelated, each within six standard errors."""
    numbers = seeds.uniforms([key], 0, 4096)[0]
    root = 4096**0.5
    assert abs(numbers.mean() - 1 / 2) < 6 * 12**-0.5 / root
    assert abs(numbers.var() - 1 / 12) < 6 * 180**-0.5 / root
    assert abs(np.corrcoef(numbers[1:], numbers[:-1])[0, 1]) < 6 / root


@given(parts, parts)
def test_different_paths_give_different_keys(one: list, other: list) -> None:
    assert (seeds.key(*one) == seeds.key(*other)) == (one == other)


@given(seed=st.integers(0, 2**40), letter=st.characters(max_codepoint=127))
def test_a_word_is_not_its_bytes(seed: int, letter: str) -> None:
    """A path with a word is another path than the one with the numbers that the word is made of."""
    assert seeds.key(seed, letter) != seeds.key(seed, ord(letter), 1)
    assert seeds.key(letter) != seeds.key(ord(letter), 1)


def test_keys_have_64_bits_and_no_near_twins() -> None:
    made = [
        seeds.key(seed, "sampling", step, episode) for seed in range(5) for step in range(40) for episode in range(40)
    ]
    assert len(set(made)) == len(made)
    assert all(0 <= key < 2**64 for key in made)
    first = seeds.uniforms(made, 0, 1)[:, 0]
    assert abs(first.mean() - 0.5) < 6 * 12**-0.5 / len(made) ** 0.5
    assert seeds.key("ab", "c") != seeds.key("a", "bc")
    assert seeds.key(1, 2) != seeds.key(2, 1)
    assert seeds.key(0) != seeds.key(0, 0) != seeds.key()


def test_keys_do_not_change_between_versions() -> None:
    """A recorded run can be repeated only as long as these numbers stay."""
    assert seeds.key(0, "sampling", 3) == 6954513155188557829


@given(size=st.integers(0, 300), path=parts)
def test_permutations(size: int, path: list) -> None:
    order = seeds.permutation(size, *path)
    assert sorted(order.tolist()) == list(range(size))
    assert order.tolist() == seeds.permutation(size, *path).tolist()
    if size > 20:
        assert order.tolist() != seeds.permutation(size, *path, "other").tolist()


def test_generators() -> None:
    first, again, other = (seeds.generator(1, word).integers(0, 10**9, 5).tolist() for word in ("a", "a", "b"))
    assert first == again != other
