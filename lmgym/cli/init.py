"""`lmgym init`: write a small project, with a task and a reward of its own, that trains at once."""

import argparse
import shlex
from pathlib import Path

from lmgym.core.errors import LmgymError

RECIPE = """\
# A tiny Llama learns to put letters in order; half a minute on two CPU cores, no network.
#   lmgym train recipe.yaml
plugins: [task, reward]                     # task.py and reward.py of this folder
task: {name: sort_letters, letters: 3}
rewards: {in_place: 1.0, exact_match: 0}    # weight 0: a metric only
policy:
  model: "builtin:tiny"                     # random weights; or a Hub id, or the folder of a model
  device: cpu
  architecture: {hidden_size: 64, intermediate_size: 176, num_hidden_layers: 2}
sampling: {max_new_tokens: 8}
evaluation: {split: test, every: 40, examples: 43}

stages:
  - name: warm_start                        # imitates the references, briefly: what is an answer?
    algorithm: supervised
    optimizer: {learning_rate: 2.0e-3}
    prompts_per_step: 16
    steps: 35
  - name: rl                                # from here on the model only hears its reward
    algorithm: {name: grpo, group_size: 8}
    optimizer: {learning_rate: 5.0e-4}
    prompts_per_step: 32
    steps: 120
"""

TASK = '''\
"""The task: a function of the split that returns its examples."""

import itertools

from lmgym import Example, register
from lmgym.tasks.base import check_split


@register("task", "sort_letters")
def sort_letters(split: str, letters: int = 3, alphabet: str = "abcdef"):
    """Write letters in alphabetical order; every fifth example is held out."""
    check_split("sort_letters", split, ("train", "test"))
    words = ["".join(word) for word in itertools.product(alphabet, repeat=letters)]
    mine = [word for index, word in enumerate(words) if (index % 5 == 0) == (split == "test")]
    return [Example(id=word, prompt=f"{word}>", references=("".join(sorted(word)),)) for word in mine]
'''

REWARD = '''\
"""The reward: a function of answers and their examples that returns one number for each answer."""

from lmgym import register


@register("reward", "in_place")
def in_place(texts, examples):
    """The share of letters that stand where they should; 0 for an answer of another length."""
    scores = []
    for text, example in zip(texts, examples, strict=True):
        wanted = example.references[0]
        right = sum(letter == other for letter, other in zip(text, wanted))
        scores.append(right / len(wanted) if len(text) == len(wanted) else 0.0)
    return scores
'''

TESTS = '''\
"""Tests of the task, the reward and the recipe: run `pytest` in this folder."""

from pathlib import Path

from lmgym import Example, check_reward, check_task, load_config
from reward import in_place
from task import sort_letters


def test_the_answer_of_the_task_is_sorted():
    examples = {example.prompt: example.references for example in sort_letters("train")}
    assert examples["cab>"] == ("abc",)


def test_the_reward_is_the_share_of_letters_in_place():
    example = Example(id="cab", prompt="cab>", references=("abc",))
    assert in_place(["abc", "acb", "ab"], [example] * 3) == [1.0, 1 / 3, 0.0]


def test_task_and_reward_keep_their_contracts():
    check_task("sort_letters")
    check_reward("in_place")


def test_the_recipe_is_valid():
    load_config(Path(__file__).with_name("recipe.yaml"))
'''

README = """\
# {name}

* `lmgym train recipe.yaml` trains, into runs/recipe; `lmgym check recipe.yaml` tries the recipe without training.
* task.py has the examples, reward.py what an answer is worth; `pytest` tests both.
* `lmgym list` shows the algorithms, tasks and rewards that a recipe can name, `lmgym recipes` other recipes.
"""

FILES = {"recipe.yaml": RECIPE, "task.py": TASK, "reward.py": REWARD, "test_project.py": TESTS, "README.md": README}

NEXT = """{folder} has a task, a reward, a recipe and tests. Next:

  cd {folder}
  lmgym train recipe.yaml       half a minute on two CPU cores
  pytest                        tests the task and the reward (pip install pytest)

Then change task.py and reward.py, and name your own model in recipe.yaml."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The folder."""
    parser.add_argument("folder", metavar="FOLDER", help="the project's folder: a new or an empty one")


def run(given: argparse.Namespace) -> None:
    """Write the files and say what comes next."""
    folder = Path(given.folder)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        if any(folder.iterdir()):
            raise LmgymError(f"{folder} is not empty; name a new folder, such as {folder}-2")
        for name, text in FILES.items():
            (folder / name).write_text(text.replace("{name}", folder.absolute().name), encoding="utf-8")
    except (OSError, ValueError) as error:  # ValueError: a null character
        raise LmgymError(f"{folder} cannot be written: {getattr(error, 'strerror', None) or error}") from error
    print(NEXT.format(folder=shlex.quote(str(folder))))
