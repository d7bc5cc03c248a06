"""`topics`: open writing prompts without a right answer (as in github.com/JeevanBhoot/nanoRL, in our own words)."""

from collections.abc import Mapping
from typing import Any

from lmgym.core.errors import LmgymError
from lmgym.core.registry import register
from lmgym.tasks.base import check_split, prompt_writer
from lmgym.tasks.rows.cells import check_fields, fields_of
from lmgym.types import Example

TEMPLATE = "Write about 100 words: {topic}\n\n"
FIELDS = ("topic", "opening")

# (topic, first sentence of a story about it in the simple words of a children's book)
TOPICS: dict[str, list[tuple[str, str]]] = {
    "train": [
        ("a lighthouse keeper's last night", "Once upon a time, an old man lived in a tall house by the sea."),
        ("the smell of rain on a hot street", "One day, the sun was hot and then it started to rain."),
        ("why people keep old letters", "Grandma had a big box full of old letters."),
        ("a bakery before sunrise", "The baker woke up very early to make bread."),
        ("learning to ride a bicycle", "Tom got a new red bike for his birthday."),
        ("a market in a harbour town", "Lily and her mom went to the market near the boats."),
        ("the first day in a new country", "Anna and her family moved to a new place far away."),
        ("how a river shapes a valley", "A little river ran down from the big hill."),
        ("a violin found in an attic", "Ben went up to the attic and found a strange toy."),
        ("what makes a good neighbour", "Next to Mia's house there lived a kind old lady."),
        ("a train that stops for no reason", "The little train stopped in the middle of the field."),
        ("the quiet of deep snow", "In the morning everything was white with snow."),
        ("a gardener and a stubborn weed", "Sam worked in the garden and saw an ugly plant."),
        ("the invention of the wheel", "Long ago, a man had a very heavy stone to move."),
        ("a kitchen where three generations cook", "Mom, Grandma and Sue made soup together."),
        ("waiting for important news", "Max sat by the door and waited for his dad."),
        ("the life of a honeybee", "There was a small bee who loved flowers."),
        ("a map with a missing corner", "Jack found an old map, but a piece was gone."),
        ("why the night sky feels large", "At night, Amy looked up and saw many stars."),
        ("an argument about a chess game", "Two friends played a game and both wanted to win."),
        ("a fishing trip without fish", "Dad and Leo took a small boat to catch a fish."),
        ("the repair of a broken clock", "The big clock in the house did not work any more."),
        ("how to comfort a friend", "Lucy saw that her friend was sad."),
        ("a library in the desert", "A man had many books, but no one came to read them."),
        ("the last day of summer", "It was the last warm day and the kids went to the park."),
        ("a dog that finds its way home", "Spot the dog was lost in the forest."),
        ("the sound of a city waking up", "Early in the day, the town was very quiet."),
        ("a tailor and an impossible coat", "A king wanted a coat as blue as the sky."),
        ("the patience of mountains", "A big mountain stood above the small town."),
        ("a kite on a windy beach", "Ella had a pretty kite and the wind was strong."),
    ],
    "validation": [
        ("a bridge between two villages", "Two towns had a river between them."),
        ("the taste of a childhood meal", "Tim loved the pie that his mom made."),
        ("an old cat in the sun", "A fat old cat slept in the sun all day."),
        ("what machines cannot do", "There was a shiny robot who wanted to play."),
    ],
    "test": [
        ("a storm at sea", "The boat was far out when the sky turned dark."),
        ("the courage to say sorry", "Ben broke his sister's best toy."),
        ("a forest seen by an owl", "A wise owl sat high in a tree."),
        ("the joy of making things by hand", "Sara wanted to make a gift for her dad."),
        ("a door that nobody opens", "At the end of the hall there was a small door."),
        ("how music changes a room", "One day a boy brought a drum to school."),
    ],
}


def _about(topic: str, arguments: Mapping[str, Any]) -> str:
    """The prompt of a topic (or an opening, where the template has that field)."""
    template = "{opening}" if arguments["opening"] else arguments["template"]
    _check_template(template)
    return str(template.format(topic=topic, opening=topic))


@register("task", "topics")
@prompt_writer(_about)
def topics(split: str, template: str = TEMPLATE, opening: bool = False) -> list[Example]:
    """One prompt per topic: 30 for training, 4 for validation, 6 for test; no references.

    `template` is the prompt, with the field {topic} or {opening}. `opening: true` is short for the template
    "{opening}", the first sentence of a story in simple words, for small story models that follow no instructions.

    Example:
        >>> load_task("topics", "test")[0].prompt
        'Write about 100 words: a storm at sea\\n\\n'
        >>> load_task("topics", "test", opening=True)[0].prompt
        'The boat was far out when the sky turned dark.'
    """
    check_split("topics", split)
    if opening and template != TEMPLATE:
        raise LmgymError("task.opening is short for a template; give task.template alone, with {opening} in it")
    template = "{opening}" if opening else template
    _check_template(template)
    return [
        Example(
            id=f"topics/{split}/{index}", prompt=template.format(topic=topic, opening=sentence), meta={"topic": topic}
        )
        for index, (topic, sentence) in enumerate(TOPICS[split])
    ]


def _check_template(template: str) -> None:
    named = [name for name, _, _ in fields_of(template, "task.template")]
    if not named:
        raise LmgymError("task.template must hold {topic} or {opening}, or all prompts would be the same")
    check_fields(named, FIELDS)
