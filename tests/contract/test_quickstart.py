"""The demonstration is honest: what it is tested on occurs nowhere in training, the base model's included."""

import re

import pytest

from lmgym.config.build import load_config
from lmgym.training.setup import held_out_examples, training_examples
from lmgym.types import Example

NUMBER = re.compile(r"\d+")


def pairs(examples: list[Example]) -> set[tuple[int, ...]]:
    """The numbers of each problem, whatever their order and the operation."""
    return {tuple(sorted(map(int, NUMBER.findall(str(example.prompt))))) for example in examples}


@pytest.mark.slow
def test_no_held_out_pair_of_numbers_is_in_any_training_data() -> None:
    quickstart, base = load_config("quickstart"), load_config("sums")
    trained = [pairs(training_examples(config, stage)) for config in (quickstart, base) for stage in config.stages]
    assert [len(found) > 50 for found in trained] == [True, True, True]
    for split in ("validation", "test"):
        held_out = pairs(held_out_examples(quickstart, split))
        assert len(held_out) > 50
        for found in trained:
            assert not found & held_out


def test_the_quickstart_begins_with_the_model_that_the_base_recipe_trains() -> None:
    quickstart, base = load_config("quickstart"), load_config("sums")
    assert (quickstart.policy.model, base.policy.model) == ("builtin:sums", "builtin:tiny")
    references = [example.references[0] for example in training_examples(base, base.stages[0])[:100]]
    assert all(re.fullmatch(r" \d+[+-]\d+=\d+", reference) for reference in references)
