"""Tasks and environments with pictures: the usual formats of data, what is refused, drawn shapes, and an environment
whose observation is what it draws."""

import base64
import io
import json
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from lmgym.config.build import build_config
from lmgym.core.errors import LmgymError
from lmgym.envs.agent import Agent
from lmgym.envs.base import Step
from lmgym.envs.env_processes import EnvProcesses
from lmgym.envs.gymnasium import Gymnasium
from lmgym.envs.vector import Opening
from lmgym.pictures.store import PictureStore, current_store, keep_pictures_in
from lmgym.rewards.text.form import exact_match
from lmgym.tasks.base import check_task, load_task
from lmgym.tasks.shapes import COLOURS, Shape, picture_of
from lmgym.tasks.streamed import StreamedExamples
from lmgym.training.planning.picture_disk import of_data, of_environment, stored_in, too_much
from lmgym.training.resuming.fingerprint import data_digest
from lmgym.types import PICTURE, Episode, Example, RecipeText, Turn, picture_text, pictures_of, told_apart
from tests import runs
from tests.contract import lights


def png(colour: str = "red", size: int = 4) -> bytes:
    out = io.BytesIO()
    Image.new("RGB", (size, size), colour).save(out, "PNG")
    return out.getvalue()


@pytest.fixture(autouse=True)
def store(tmp_path: Path) -> PictureStore:
    keep_pictures_in(tmp_path / "run" / "pictures")
    return current_store()


def name_of(data: bytes) -> str:
    return current_store().put(data)


def loaded(folder: Path, rows: list[dict[str, Any]], split: str = "train", **arguments: Any) -> list[Example]:
    """The examples of these rows of a .jsonl file, all of them in train."""
    path = folder / "data" / "rows.jsonl"
    path.parent.mkdir(exist_ok=True)
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return list(load_task("data", split, path=str(path), **{"test": 0, **arguments}))


def contents(example: Example) -> list[tuple[str, list[str]]]:
    """The texts of a prompt's messages, each with the pictures in it."""
    assert not isinstance(example.prompt, str)
    return [(one["content"], [digest for _, digest in pictures_of(one["content"])]) for one in example.prompt]


# Formats


def test_a_picture_may_be_a_file_an_address_or_base64(tmp_path: Path) -> None:
    (tmp_path / "data" / "img").mkdir(parents=True)
    (tmp_path / "data" / "img" / "ä 1.png").write_bytes(png())
    text = base64.b64encode(png()).decode()
    forms = ["img/ä 1.png", f"data:image/png;base64,{text}", text, {"bytes": text, "path": None},
             {"bytes": None, "path": "img/ä 1.png"}, {"url": f"data:image/png;base64,{text}"}]  # fmt: skip
    rows = [{"image": form, "prompt": f"{n}?"} for n, form in enumerate(forms)]
    for number, example in enumerate(loaded(tmp_path, rows)):
        assert contents(example) == [(f"{PICTURE}{number}?", [name_of(png())])]
        assert not example.meta
    # Links within the folder, and a folder of the recipe's.
    os.symlink("ä 1.png", tmp_path / "data" / "img" / "b.png")
    [example] = loaded(tmp_path, [{"image": "b.png", "prompt": "?"}], image_folder=str(tmp_path / "data" / "img"))
    assert contents(example)[0][1] == [name_of(png())]


def test_the_datasets_library_s_structs(tmp_path: Path) -> None:
    """As clevr-count (one picture, no mark) and geometry3k (a list, with marks) have them."""
    pyarrow = pytest.importorskip("pyarrow")
    parquet = pytest.importorskip("pyarrow.parquet")
    one = [{"bytes": png(colour), "path": None} for colour in ("red", "blue")]
    clevr = {"image": one, "problem": ["How many items?", "How many spheres?"],
             "solution": ["<answer> 3 </answer>", "<answer> 2 </answer>"]}  # fmt: skip
    parquet.write_table(pyarrow.table(clevr), tmp_path / "clevr.parquet")
    keys = {"references": {"column": "solution", "pattern": "<answer>(.*)</answer>"}, "test": 0}
    examples = load_task("data", "train", path=str(tmp_path / "clevr.parquet"), prompt="problem", **keys)
    assert [contents(example) for example in examples] == [
        [(f"{PICTURE}How many items?", [name_of(png("red"))])],
        [(f"{PICTURE}How many spheres?", [name_of(png("blue"))])],
    ]
    assert [example.references for example in examples] == [("3",), ("2",)]
    geometry = {"images": [one, one[:1]], "problem": ["<image>Find x, as in <image>.", "<image>Find y."],
                "answer": ["3", "4"]}  # fmt: skip
    parquet.write_table(pyarrow.table(geometry), tmp_path / "geometry.parquet")
    for streaming in (False, True):
        examples = load_task("data", "train", path=str(tmp_path / "geometry.parquet"), prompt="problem",
                             references="answer", test=0, streaming=streaming)  # fmt: skip
        assert isinstance(examples, StreamedExamples) == streaming
        assert contents(examples[0]) == [
            (f"{PICTURE}Find x, as in {PICTURE}.", [name_of(png("red")), name_of(png("blue"))])
        ]
        assert contents(examples[1]) == [(f"{PICTURE}Find y.", [name_of(png("red"))])]


def test_messages_with_parts_and_llava_s_conversations(tmp_path: Path) -> None:
    (tmp_path / "data").mkdir()
    for colour in ("red", "blue"):
        (tmp_path / "data" / f"{colour}.png").write_bytes(png(colour))
    red, blue = name_of(png("red")), name_of(png("blue"))
    address = "data:image/png;base64," + base64.b64encode(png("blue")).decode()
    parts = [{"type": "text", "text": "A"}, {"type": "image"}, {"type": "text", "text": "or"}, {"type": "image"}]
    own = [{"type": "image_url", "image_url": {"url": address}}, {"type": "text", "text": "What <image>?"}]
    llava = [
        {"from": "human", "value": "<image>\nWhat is it?"}, {"from": "gpt", "value": "A square."},
        {"from": "human", "value": "Which colour?"}, {"from": "gpt", "value": "Red."},
    ]  # fmt: skip
    system = {"role": "system", "content": "Look."}
    rows: list[dict[str, Any]] = [
        {"prompt": [system, {"role": "user", "content": parts}], "images": ["red.png", "blue.png"]},
        {"prompt": [{"role": "user", "content": own}]},
        {"prompt": json.dumps([system, {"role": "user", "content": "How many?"}]), "images": ["blue.png", "red.png"]},
    ]
    examples = loaded(tmp_path, rows)
    assert contents(examples[0]) == [("Look.", []), (f"A{PICTURE}or{PICTURE}", [red, blue])]
    assert contents(examples[1]) == [(f"{PICTURE}What <image>?", [blue])]  # no mark of a row without a column
    assert contents(examples[2]) == [("Look.", []), (f"{PICTURE}{PICTURE}How many?", [blue, red])]
    keys = {"prompt": "conversations.:-1", "references": "conversations.-1.value"}
    [example] = loaded(tmp_path, [{"id": "1", "image": "red.png", "conversations": llava}], **keys)
    assert contents(example) == [(f"{PICTURE}\nWhat is it?", [red]), ("A square.", []), ("Which colour?", [])]
    assert example.references == ("Red.",)


def test_a_template_names_the_column(tmp_path: Path) -> None:
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "a.png").write_bytes(png())
    row = {"photo": "a.png", "q": "<image> or not?"}
    [example] = loaded(tmp_path, [row], prompt="Q: {q} {photo}", images="photo", references=None)
    assert contents(example) == [(f"Q: <image> or not? {PICTURE}", [name_of(png())])]
    messages = [{"role": "system", "content": "Look at {photo}."}, {"role": "user", "content": "{q}"}]
    [example] = loaded(tmp_path, [row], prompt=messages, images="photo", references=None)
    assert contents(example) == [(f"Look at {PICTURE}.", [name_of(png())]), ("<image> or not?", [])]
    [example] = loaded(tmp_path, [{"prompt": "<image>?", "image": 3}], images=None, references=None)
    assert example.prompt == "<image>?" and example.meta == {"image": 3}  # a column like others


def test_equal_questions_about_other_pictures_are_other_prompts(tmp_path: Path) -> None:
    """A share for test is taken by question and picture; and a changed picture is a changed data set."""
    rows = [{"image": base64.b64encode(png("red", 4 + n)).decode(), "prompt": "How many?"} for n in range(60)]
    train, test = (loaded(tmp_path, rows, split, test=0.4) for split in ("train", "test"))
    assert len(train) + len(test) == 60 and 10 < len(test) < 40
    assert not {told_apart(one.prompt) for one in train} & {told_apart(one.prompt) for one in test}
    streamed = loaded(tmp_path, rows, "test", test=0.4, streaming=True)
    assert [example.prompt for example in streamed] == [example.prompt for example in test]
    before = data_digest(loaded(tmp_path, rows))
    after = data_digest(loaded(tmp_path, [*rows[:-1], {**rows[-1], "image": base64.b64encode(png("blue")).decode()}]))
    assert before["sha256"] != after["sha256"]
    check_task("data", path=str(tmp_path / "data" / "rows.jsonl"), test=0.4)


# What is refused

HOSTILE: dict[str, tuple[dict[str, Any], str]] = {
    "address": ({"image": "https://example.com/a.png"}, "is an address, and nothing is fetched from the network"),
    "file address": ({"image": "file:///etc/passwd"}, "is an address"),
    "out": ({"image": "../secret.png"}, "leads out of .*data, and only pictures below it are read"),
    "absolute": ({"image": "/etc/hostname"}, "leads out of"),
    "link": ({"image": "link.png"}, "leads out of"),
    "circle": ({"image": "circle.png"}, "cannot read the picture|leads out"),
    "missing": ({"image": "cat.pgn"}, "No such file or directory; did you mean .*cat.png"),
    "folder": ({"image": "."}, "cannot read the picture .*directory"),
    "pipe": ({"image": "pipe"}, "it is a pipe or a device"),
    "null": ({"image": "a\0b"}, "cannot read the picture .*null"),
    "too long": ({"image": "a/" * 3000}, "cannot read the picture|File name too long"),
    "number": ({"image": 3}, "column 'image' must hold pictures .paths of files, .* task.images: null leaves"),
    "no picture": ({"image": "rows.jsonl"}, "rows.jsonl.*: the picture cannot be read; give one of"),
    "no base64": ({"image": "data:image/png;base64,@@"}, "is no base64"),
    "svg": ({"image": "data:image/svg+xml,<svg/>"}, "a data: address must hold base64"),
    "too few": ({"image": "cat.png", "prompt": "<image> and <image>"}, "the row has 1 pictures and its prompt 2"),
    "too many": ({"images": ["cat.png"] * 3, "prompt": [{"role": "user", "content": [{"type": "image"}]}]},
                 "the row has 3 pictures and its prompt 1 places"),
    "none": ({"prompt": [{"role": "user", "content": [{"type": "image"}]}]}, "has more places for pictures than"),
    "video": ({"prompt": [{"role": "user", "content": [{"type": "video", "video": "a.mp4"}]}]},
              "a part of a message is of type 'video'; text and image can be read"),
    "twice": ({"image": "cat.png", "prompt": [{"role": "user", "content": [{"type": "image", "path": "cat.png"}]}]},
              "has pictures of its own, and so has the row's column"),
}  # fmt: skip


@pytest.mark.parametrize("name", HOSTILE)
def test_what_is_wrong_is_said_with_file_line_and_column(tmp_path: Path, name: str) -> None:
    folder = tmp_path / "data"
    folder.mkdir()
    (folder / "cat.png").write_bytes(png())
    (tmp_path / "secret.png").write_bytes(png("blue"))
    os.symlink(tmp_path / "secret.png", folder / "link.png")
    os.symlink("circle.png", folder / "circle.png")
    os.mkfifo(folder / "pipe")
    row, expected = HOSTILE[name]
    with pytest.raises(LmgymError, match=f"rows.jsonl:2: .*({expected})") as refused:
        loaded(tmp_path, [{"prompt": "first"}, {"prompt": "How many?", **row}], references=None)
    assert "\n" not in str(refused.value) and len(str(refused.value)) <= 1000


def test_unfit_pictures_can_be_left_out(tmp_path: Path) -> None:
    rows = [{"image": base64.b64encode(png()).decode(), "prompt": "?"}, {"image": "none.png", "prompt": "?"}]
    assert len(loaded(tmp_path, rows, unfit="drop", references=None)) == 1
    with pytest.raises(LmgymError, match="image_folder: there is no folder"):
        loaded(tmp_path, rows, image_folder=str(tmp_path / "nowhere"))


# Shapes


def test_shapes_are_drawn_by_hand() -> None:
    drawn = [Shape("circle", "red", 4, 4, 2), Shape("square", "blue", 12, 4, 1), Shape("triangle", "green", 8, 11, 2)]
    white = (255, 255, 255)
    letters = {COLOURS["red"]: "r", COLOURS["blue"]: "b", COLOURS["green"]: "g", white: "."}
    lines = ["".join(letters[tuple(pixel)] for pixel in row) for row in picture_of(drawn, 16).tolist()]
    assert lines == [
        "................", "................", "....r...........", "...rrr.....bbb..",
        "..rrrrr....bbb..", "...rrr.....bbb..", "....r...........", "................",
        "................", "........g.......", "........g.......", ".......ggg......",
        ".......ggg......", "......ggggg.....", "................", "................",
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        ({"ask": []}, "task.ask is empty; name some of count, colour and position"),
        ({"most": 5, "pixels": 24}, "task.most is 5, and 24 pixels have no room for so many shapes"),
        ({"ask": ["position"], "most": 1}, "position needs two shapes that differ; raise task.most"),
        ({"ask": ["position"], "kinds": 1, "colours": 1}, "position needs two shapes that differ; raise task.most"),
    ],
)
def test_shapes_that_allow_no_picture_with_a_question_are_refused(arguments: dict[str, Any], sentence: str) -> None:
    with pytest.raises(LmgymError, match=sentence):
        load_task("shapes", "train", **arguments)


def test_questions_about_shapes_have_the_answers_of_their_pictures(store: PictureStore) -> None:
    arguments: dict[str, Any] = {"size": 60, "validation_size": 10, "test_size": 10, "most": 5, "pixels": 48}
    examples = load_task("shapes", "train", ask=["count", "colour", "position"], **arguments)
    kinds = {"How": 0, "Which": 0, "Is": 0}
    for example in examples:
        [(place, digest)] = pictures_of(example.prompt)  # type: ignore[arg-type]
        question, answer = example.meta["question"], example.meta["answer"]
        assert (
            place == 0 and example.prompt == f"{PICTURE}{question}\nAnswer:" and example.references == (f" {answer}",)
        )
        kinds[question.split()[0]] += 1
        pixels = np.asarray(store.open(digest)).reshape(-1, 3)
        colours = {name for name, colour in COLOURS.items() if (pixels == colour).all(1).any()}
        if question == "How many shapes are there?":
            assert int(answer) == example.meta["shapes"] >= len(colours)
        if question.startswith("Which"):
            assert answer in colours
        if question.startswith("Is"):
            first, second = question.removeprefix("Is the ").removesuffix("?").split(" left or right of the ")
            middles = []
            for colour in (first.split()[0], second.split()[0]):
                middles.append(np.nonzero((np.asarray(store.open(digest)) == COLOURS[colour]).all(2))[1])
            if first.split()[0] != second.split()[0] and example.meta["shapes"] == 2:
                assert (middles[0].mean() < middles[1].mean()) == (answer == "left")
    assert min(kinds.values()) > 8
    assert exact_match([" 3\n", "3", "4"], [Example("a", "?", (" 3",))] * 3) == [1.0, 1.0, 0.0]
    again = load_task("shapes", "train", ask=["count", "colour", "position"], **{**arguments, "size": 20})
    assert again == examples[:20]
    check_task("shapes", **{**arguments, "size": 20})
    with pytest.raises(LmgymError, match=r"task\.most is 9, and 24 pixels have no room"):
        load_task("shapes", "train", most=9, pixels=24)
    with pytest.raises(LmgymError, match=r"split 'train' has about \d+ different problems; lower it, or raise"):
        load_task("shapes", "train", size=5000, most=1, pixels=16, kinds=1, colours=1)


# Environments


GAME = Example("game/0", "a game")


def lamp(store: PictureStore, text: str) -> int:
    [(_, digest)] = pictures_of(text)
    return int(np.asarray(store.open(digest))[0, :, 0].argmax()) // 8


@pytest.mark.parametrize("name", ["Lights-v0", "Pixels-v0"])
def test_an_environment_shows_what_it_draws(name: str, store: PictureStore) -> None:
    env = Gymnasium(id=name, show="{picture}Which lamp is on?", on_invalid="retry")
    [asked] = env.reset(GAME, seed=4)
    assert asked["content"] == f"{PICTURE}Which lamp is on?" and lamp(store, asked["content"]) == 1
    refused = env.step("the middle one", "eos")
    text = refused.messages[0]["content"]
    assert text == asked["content"] and lamp(store, text) == 1  # the plain agent shows it again
    step = env.step("1", "eos")
    assert step.reward == 1 or name == "Pixels-v0"
    assert lamp(store, step.messages[0]["content"]) == (2 if name == "Lights-v0" else 1)
    assert len(list(store.folder.rglob("*.png"))) == (2 if name == "Lights-v0" else 1)


class Words(Agent):
    """An agent that repeats the observation behind its complaint."""

    def format_observation(self, observation: Any) -> str:
        return "You see:"


def test_a_picture_stands_beside_the_agent_s_words(store: PictureStore) -> None:
    env = Gymnasium(id="Lights-v0", agent=f"{__name__}:Words", show="{observation} {picture}", picture_pixels=12)
    [asked] = env.reset(GAME, seed=0)
    assert asked["content"] == f"You see: {PICTURE}"
    assert store.open(pictures_of(asked["content"])[0][1]).size == (12, 4)
    refused = env.step("", "eos").messages[0]["content"]
    assert refused.endswith(f". You see: {PICTURE}") and len(pictures_of(refused)) == 1
    with pytest.raises(LmgymError, match=r"'Dark-v0' has no \{picture\}: it draws none with render_mode: rgb_array"):
        Gymnasium(id="Dark-v0", show="{picture}").reset(GAME, seed=0)


def test_what_pictures_will_take_of_the_disk_is_said(store: PictureStore, tmp_path: Path) -> None:
    config = build_config(runs.tiny(prompts_per_step=2, steps=10, out=str(tmp_path / "new" / "run")))
    asked, drawn = store.put(png()), store.put(png("blue"))
    episode = Episode(Example("a", RecipeText.join(picture_text(asked), "?")), 0, 0, [Turn([1], [2])] * 3)
    now, stage = stored_in(store.folder), config.stages[0]
    sentence, total = of_environment({}, now, [episode], stage)
    assert total == now[drawn] * 2 * 4 * 10  # of 2 prompts, 4 answers each
    assert sentence.startswith("pictures of the environment: 1 different ones in 3 turns, 0 KiB; if it goes on like")
    assert of_environment(now, now, [episode], stage) == ("", 0.0) and of_data({}) == "" == too_much(config, total)
    assert of_data(now) == "pictures of the data: 2, 0 KiB, which the run folder will hold"
    assert f"and the disk of {tmp_path} has " in too_much(config, 1e30)


@pytest.mark.processes
def test_processes_of_environments_put_pictures_into_the_run_s_folder(store: PictureStore) -> None:
    envs = EnvProcesses("gymnasium", {"id": f"{lights.__name__}:Lights-v0", "show": "{picture}?"}, count=1)
    try:
        [opening] = envs.begin([(0, GAME, 5)])
        [step] = envs.step([(0, "2", "eos")])
    finally:
        envs.close()
    assert isinstance(opening, Opening) and not isinstance(opening.prompt, str)
    assert isinstance(step, Step) and lamp(store, step.messages[0]["content"]) == 0
    assert lamp(store, opening.prompt[-1]["content"]) == 2
