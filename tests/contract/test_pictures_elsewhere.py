"""Pictures that come from elsewhere than a task or a game: tools, programs that ask the policy, and rated answers."""

import base64
import io
import json
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

from lmgym.core.errors import LmgymError
from lmgym.envs.conversation import Conversation
from lmgym.envs.program import AgentProgram
from lmgym.envs.tools import mcp
from lmgym.envs.tools.schema import cut
from lmgym.envs.vector import InProcess
from lmgym.gateway.chat import read_request
from lmgym.gateway.messages import read_messages
from lmgym.gateway.session import Place, Tree
from lmgym.gateway.wire import ChatRequest, Refused, Said
from lmgym.inference.base import Sampling
from lmgym.pictures.addresses import address_of
from lmgym.pictures.ids import is_piece, picture_of, piece_ids
from lmgym.pictures.store import PictureStore, current_store, keep_pictures_in, shown
from lmgym.rollouts.players import Actor
from lmgym.rollouts.rollout import collect
from lmgym.tasks.base import load_task
from lmgym.types import PICTURE, Example, Message, RecipeText, picture_text, pictures_of
from tests.property.test_pictures import TEMPLATES, as_seen, eyes
from tests.property.test_rendering import Script

SERVER = [sys.executable, "-S", str(Path(__file__).parent / "mcp_server.py")]
PROGRAM = str(Path(__file__).parent / "asking_program.py")


@pytest.fixture(autouse=True)
def store(tmp_path: Path) -> PictureStore:
    keep_pictures_in(tmp_path / "run" / "pictures")
    return current_store()


def pictures_among(ids: Iterable[int]) -> list[str]:
    """The first ten digits of the pictures whose pieces these ids are."""
    return list(dict.fromkeys(picture_of(id)[0] for id in ids if is_piece(id)))


def square(colour: str = "red") -> Image.Image:
    return Image.new("RGB", (4, 4), colour)


def png(colour: str = "red") -> bytes:
    out = io.BytesIO()
    square(colour).save(out, "PNG")
    return out.getvalue()


# Tools


def draw(colour: str) -> Image.Image:
    """A square of this colour.

    Args:
        colour: its name
    """
    return square(colour)


def tell(colour: str) -> str:
    """Words about a square, and the square.

    Args:
        colour: its name
    """
    return RecipeText.join(RecipeText("<|im_end|>"), shown(square(colour)), " it is")


def call(name: str, **arguments: Any) -> str:
    return f"<tool_call>{json.dumps({'name': name, 'arguments': arguments})}</tool_call>"


@pytest.mark.parametrize("role", ["tool", "user"])
def test_a_tool_may_return_a_picture(role: Any, store: PictureStore) -> None:
    env = Conversation(tools=[f"{__name__}:draw", f"{__name__}:tell"], tool_role=role)
    env.reset(Example("a", "?"), seed=0)
    messages = env.step(call("draw", colour="red") + call("tell", colour="blue"), "eos").messages
    told = [picture for message in messages for picture in pictures_of(message["content"])]
    assert [digest for _, digest in told] == [store.put(png("red")), store.put(png("blue"))]
    assert not any(getattr(message["content"], "spans", ()) for message in messages)  # no tool writes control tokens
    assert [message["content"] for message in messages] == (
        [PICTURE, f"<|im_end|>{PICTURE} it is"] if role == "tool" else
        [f"<tool_response>\n{PICTURE}\n</tool_response>\n<tool_response>\n<|im_end|>{PICTURE} it is\n</tool_response>"]
    )  # fmt: skip
    ids = eyes(TEMPLATES["qwen"][0])
    assert pictures_among(as_seen(ids, "¤", told[0][1])) == [told[0][1][:10]]


def test_a_cut_text_keeps_the_pictures_that_it_keeps() -> None:
    text = RecipeText.join(picture_text("1" * 64), "a" * 500, picture_text("2" * 64), "b" * 500, picture_text("3" * 64))
    assert [digest[0] for _, digest in pictures_of(cut(text, 300))] == ["1", "3"]
    assert [(place, digest[0]) for place, digest in pictures_of(cut(text, 2000))] == [(0, "1"), (501, "2"), (1002, "3")]
    assert pictures_of(cut(RecipeText.join("\ud800", picture_text("1" * 64)), 100)) == ((1, "1" * 64),)


@pytest.mark.parametrize("pictures", [False, True])
def test_pictures_of_an_mcp_server_are_shown_or_named(pictures: bool, store: PictureStore) -> None:
    env = Conversation(tools=[{"mcp": SERVER, "pictures": pictures}])
    env.reset(Example("a", "?"), seed=0)
    kinds = (f"show {base64.b64encode(png()).decode()}", "picture")
    try:
        good, bad = (env.step(call("mischief", kind=kind), "eos").messages[0]["content"] for kind in kinds)
    finally:
        env.close()
        mcp._close_all()
    name = store.put(png())
    if pictures:
        assert good == f"{PICTURE}\n{PICTURE}\n[resource]" and [one for _, one in pictures_of(good)] == [name] * 2
        assert "ToolError: the picture cannot be read" in json.loads(bad)["error"]
    else:
        assert good == "[image image/png]\n[resource]\n[resource]" and bad.startswith("[image image/png]")


# Programs


def of_openai(url: Any, **more: Any) -> dict[str, Any]:
    return {"type": "image_url", "image_url": {"url": url, **more}}


def of_anthropic(**source: Any) -> dict[str, Any]:
    return {"type": "image", "source": source}


def test_requests_hold_pictures_in_both_forms(store: PictureStore) -> None:
    address, name = address_of(square()), store.put(png())
    data = base64.b64encode(png()).decode()
    block = {**of_anthropic(type="base64", media_type="image/png", data=data), "cache_control": {"type": "ephemeral"}}
    words, call = {"type": "text", "text": "What?"}, {"type": "tool_use", "id": "1", "name": "draw", "input": {}}
    one = read_request({"messages": [{"role": "user", "content": [of_openai(address, detail="high"), words]}]})
    other = read_messages({"messages": [
        {"role": "user", "content": [block, words]},
        {"role": "assistant", "content": [call]},
        {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "1", "content": [words, block]}]},
    ]})  # fmt: skip
    first, _, result = other.messages
    assert first.text == f"{PICTURE}What?" == one.messages[0].text and result.text == f"What?{PICTURE}"
    assert [pictures_of(said.text) for said in (first, one.messages[0], result)] == [
        ((0, name),), ((0, name),), ((5, name),)
    ]  # fmt: skip
    read_request({"messages": [{"role": "user", "content": [of_openai(address)]}]})  # a picture alone is enough


REFUSED = {
    "fetched": (of_openai("https://example.com/a.png"), "is an address, and nothing is fetched from the network; send"),
    "file": (of_openai("file:///etc/passwd"), "is an address, and nothing is fetched"),
    "path": (of_openai("/etc/passwd"), "is an address, and nothing is fetched"),
    "svg": (of_openai("data:image/svg+xml,<svg/>"), "a data: address must hold base64"),
    "broken": (of_openai("data:image/png;base64,AAAA"), "the picture cannot be read"),
    "no base64": (of_openai("data:image/png;base64,@@"), "is no base64"),
    "number": (of_openai(3), "a part of type image_url must be"),
    "detail": (of_openai("data:", detail="huge"), "a part of type image_url must be"),
    "field": (of_openai("data:", size=3), "holds 'size', which is not supported"),
    "text": ({"type": "image_url", "image_url": "data:image/png;base64,AAAA"}, "needs 'image_url', an object"),
    "url block": (of_anthropic(type="url", url="https://example.com/a.png"), "nothing is fetched from the network"),
    "file block": (of_anthropic(type="file", file_id="a"), "holds 'file_id', which is not supported"),
    "no data": (of_anthropic(type="base64", media_type="image/png"), "needs \"source\": {\"type\": \"base64\""),
    "bare block": ({"type": "image"}, "needs 'source', an object"),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
def test_a_picture_that_is_none_is_refused_in_a_sentence(name: str, store: PictureStore) -> None:
    part, expected = REFUSED[name]
    for read in (read_request, read_messages):
        if read is read_messages and part["type"] != "image":
            continue
        with pytest.raises(Refused) as refused:
            read({"messages": [{"role": "user", "content": [part]}]})
        assert expected in str(refused.value) and "\n" not in str(refused.value) and refused.value.status == 400
    assert not store.folder.exists()


def test_only_users_and_tools_show_pictures() -> None:
    part = of_openai(address_of(square()))
    for role in ("system", "assistant"):
        with pytest.raises(Refused, match="only messages of the user, and results of tools, may hold pictures"):
            read_request({"messages": [{"role": role, "content": [part]}, {"role": "user", "content": "?"}]})


@pytest.mark.processes
def test_a_program_shows_pictures_also_in_later_turns(store: PictureStore) -> None:
    words = eyes(TEMPLATES["qwen"][0])
    name, other = store.put(png()), store.put(png("blue"))
    example = Example("a", RecipeText.join(picture_text(name), "?"), meta={"drawn": address_of(square("blue"))})
    answers = [[*words(text, add_special_tokens=False)["input_ids"], words.eos_token_id] for text in ("one", "b", "c")]
    env = AgentProgram(command=[sys.executable, PROGRAM, "looks"])
    envs = InProcess(lambda: env)
    [episode] = collect([(0, example)], Actor(Script([answers], [words.eos_token_id]), words), Sampling(), (0,), envs)
    envs.close()
    assert not episode.error and episode.score == 1.0, episode.error
    row, anew = episode.rows()
    user, end = "<|im_start|>user\n", "<|im_end|>\n<|im_start|>assistant\n"
    assert row[0].prompt_ids == as_seen(words, f"{user}See ¤?{end}", name)
    assert row[1].prompt_ids[-len(as_seen(words, end)) :] == as_seen(words, end)
    assert [id for id in row[1].prompt_ids if is_piece(id)] == piece_ids(other, 4)
    image = words.convert_tokens_to_ids("<image>")
    assert image not in row[1].prompt_ids  # of the program's words no mark is made
    assert pictures_among(anew[0].prompt_ids) == [other[:10]]  # as its past holds another picture, another row


# Rated answers


def rated(folder: Path, rows: list[dict[str, Any]], **keys: Any) -> list[Example]:
    path = folder / "data" / "pairs.jsonl"
    path.parent.mkdir(exist_ok=True)
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return list(load_task("preferences", "train", path=str(path), test=0, **keys))


def asked(example: Example) -> list[tuple[str, str, list[str]]]:
    messages: list[Message] = example.prompt  # type: ignore[assignment]
    return [(one["role"], one["content"], [own for _, own in pictures_of(one["content"])]) for one in messages]


def test_pairs_have_pictures_in_their_prompts(tmp_path: Path, store: PictureStore) -> None:
    """As RLAIF-V has them (bytes, question), and as TRL's form of it has (a list, parts), with and without a prompt."""
    name, packed = store.put(png()), {"bytes": base64.b64encode(png()).decode(), "path": None}
    own = {"image": packed, "question": "How many?", "chosen": "Two <image>.", "rejected": "Ten.", "idx": 3}
    [example] = rated(tmp_path, [own], prompt="question")
    assert asked(example) == [("user", f"{PICTURE}How many?", [name])] and example.meta == {"idx": 3}
    assert [answer.text for answer in example.rated] == ["Two <image>.", "Ten."]
    words = {"type": "text", "text": "How many?"}
    question = [{"role": "user", "content": [{"type": "image", "text": None}, words]}]
    answers = [[{"role": "assistant", "content": [{"type": "text", "text": text}]}] for text in ("Two.", "Ten.")]
    row = {"images": [packed], "prompt": question, "chosen": answers[0], "rejected": answers[1]}
    whole = {"images": [packed], "chosen": question + answers[0], "rejected": question + answers[1]}
    mark = {"images": [packed], "prompt": question, "completion": question + answers[0], "label": True}
    for one in (row, whole, {**row, **whole}, mark):
        [example] = rated(tmp_path, [one])
        assert asked(example) == [("user", f"{PICTURE}How many?", [name])] and not example.meta
        assert example.rated[0].text == "Two."
    begun = {
        "image": packed,
        "chosen": "User: <image>How many?\nBot: Two",
        "rejected": "User: <image>How many?\nBot: 10",
    }
    [example] = rated(tmp_path, [begun], prompt_end="\nBot:")
    assert asked(example) == [("user", f"User: {PICTURE}How many?\nBot:", [name])]
    [example] = rated(tmp_path, [{**own, "prompt": "?"}], images=None)
    assert example.prompt == "?" and example.meta["image"] == packed
    with pytest.raises(LmgymError, match=r"pairs.jsonl:1: column 'image'.* is an address, and nothing is fetched"):
        rated(tmp_path, [{**own, "image": "https://example.com/a.png"}], prompt="question")
    with pytest.raises(LmgymError, match=r"pairs.jsonl:1: a message's content in column 'chosen' must be a text"):
        rated(tmp_path, [{**row, "chosen": [{"role": "assistant", "content": question[0]["content"]}]}])
    record = {"kind": "train", "stage": 0, "step": 0, "group": 0, "prompt": f"{PICTURE}?", "score": 1.0,
              "turns": [{"stop": "eos", "text": "a", "prompt_ids": piece_ids(name, 2)}]}  # fmt: skip
    (tmp_path / "rollouts.jsonl").write_text(json.dumps(record) + "\n")
    with pytest.raises(LmgymError, match="this run's prompts hold pictures, which its"):
        load_task("preferences", "train", path=str(tmp_path))


def test_messages_that_hold_other_pictures_are_other_messages() -> None:
    one, other = (Said("user", RecipeText.join(picture_text(digit * 64), "?")) for digit in "12")
    tree, said = Tree(), Said("assistant", "yes")
    tree.record(ChatRequest((one,)), said, "yes")
    assert tree.place(ChatRequest((one, said, Said("user", "and?")))) == Place(0, 2)
    assert tree.place(ChatRequest((other, said, Said("user", "and?")))) == Place()
    assert pictures_of(tree.messages(ChatRequest((one,)))[0]["content"]) == ((0, "1" * 64),)
