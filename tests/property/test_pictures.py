"""Pictures: what the store keeps of a file, what it refuses, and that texts and ids keep them through files, processes
and templates."""

import hashlib
import io
import json
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from lmgym.core.errors import LmgymError
from lmgym.envs.base import Step
from lmgym.envs.env_worker import from_json, to_json
from lmgym.envs.vector import Opening
from lmgym.logs.traces.trace import packed, row_of_turns, unpacked
from lmgym.pictures import store as store_module
from lmgym.pictures.ids import is_piece, piece_ids
from lmgym.pictures.store import FIRST_FRAME, MOST_BYTES, PictureStore, keep_pictures_in, shown
from lmgym.rollouts.actor import PromptCache
from lmgym.tasks.prompt_forms import in_form, with_options
from lmgym.text.chat import Cut, answer_ids, appended_ids, plain_text, prompt_ids
from lmgym.text.control import split_text
from lmgym.text.pictures import decoded, read_pictures, reads_pictures
from lmgym.text.template import form_of
from lmgym.text.tokens import token_texts
from lmgym.training.planning.prompt_report import prompt_as_read
from lmgym.types import (
    PICTURE,
    BarePrompt,
    Episode,
    Example,
    RecipeText,
    Turn,
    around_pictures,
    part_of,
    picture_text,
    pictures_of,
    told_apart,
)
from tests import models
from tests.torture import pictures as torture

ONE, OTHER = "1" * 64, "2" * 64


def picture(mode: str = "RGB", size: tuple[int, int] = (6, 4), seed: int = 0) -> Image.Image:
    height, width = size[1], size[0]
    chance = np.random.default_rng(seed)
    image = Image.fromarray(chance.integers(0, 256, (height, width, 4), np.uint8), "RGBA")
    return image.convert("RGB") if mode == "RGB" else image.convert(mode)


def file_of(image: Image.Image, kind: str = "PNG", **options: Any) -> bytes:
    out = io.BytesIO()
    image.save(out, kind, **options)
    return out.getvalue()


def pixels_of(store: PictureStore, name: str) -> list[list[int]]:
    return np.asarray(store.open(name)).reshape(-1, 3).tolist()


# What is kept


def test_a_name_is_the_sum_of_the_pixels(tmp_path: Path) -> None:
    """So equal pictures are one, whatever file they come in; the number is computed here by hand."""
    store = PictureStore(tmp_path / "pictures")
    image = Image.new("RGB", (2, 1), (255, 255, 255))
    image.putpixel((0, 0), (1, 2, 3))
    name = hashlib.sha256(b"P6\n2 1\n255\n\x01\x02\x03\xff\xff\xff").hexdigest()
    assert {store.put(file_of(image, kind)) for kind in ("PNG", "BMP")} == {name}
    assert store.put(file_of(image, "WEBP", lossless=True)) == name
    assert [path.name for path in (tmp_path / "pictures").rglob("*.png")] == [f"{name}.png"]
    assert pixels_of(store, name[:10]) == [[1, 2, 3], [255, 255, 255]] == pixels_of(store, name)
    assert not (tmp_path / "pictures" / name[:2] / f"{name}.png").stat().st_mode & 0o111


@pytest.mark.parametrize(
    ("image", "expected"),
    [
        (Image.new("L", (1, 1), 7), [7, 7, 7]),
        (Image.new("1", (1, 1), 1), [255, 255, 255]),
        (Image.new("RGBA", (1, 1), (10, 20, 30, 0)), [255, 255, 255]),
        (Image.new("RGBA", (1, 1), (0, 0, 0, 51)), [204, 204, 204]),  # 255 * (1 - 51 / 255)
        (Image.new("LA", (1, 1), (0, 255)), [0, 0, 0]),
        (Image.fromarray(np.array([[0xABCD]], np.uint16)), [0xAB] * 3),
    ],
)
def test_every_mode_becomes_rgb_on_white(tmp_path: Path, image: Image.Image, expected: list[int]) -> None:
    store = PictureStore(tmp_path)
    assert pixels_of(store, store.put(file_of(image))) == [expected]


def test_palettes_cmyk_orientation_and_key_colours(tmp_path: Path) -> None:
    store = PictureStore(tmp_path)
    red = Image.new("RGB", (8, 8), (200, 10, 10))
    assert pixels_of(store, store.put(file_of(red.quantize(4), "GIF")))[0] == [200, 10, 10]
    clear = red.quantize(4)
    assert pixels_of(store, store.put(file_of(clear, "PNG", transparency=clear.getpixel((0, 0)))))[0] == [255] * 3
    cmyk = np.array(pixels_of(store, store.put(file_of(red.convert("CMYK"), "JPEG", quality=95)))[0])
    assert abs(cmyk - [200, 10, 10]).max() <= 8
    keyed = file_of(red, "PNG", transparency=(200, 10, 10))
    assert pixels_of(store, store.put(keyed))[0] == [255, 255, 255]
    # A camera's note: held upright, the left half of the file is the upper half of the picture.
    held = Image.new("RGB", (2, 1))
    held.putpixel((0, 0), (255, 0, 0))
    note = Image.Exif()
    note[0x0112] = 6
    kept = store.open(store.put(file_of(held, "PNG", exif=note)))
    assert kept.size == (1, 2) and kept.getpixel((0, 0)) == (255, 0, 0)
    assert "icc_profile" not in kept.info and not kept.getexif()


def test_of_an_animation_the_first_picture_counts(tmp_path: Path) -> None:
    frames = [Image.new("RGB", (3, 3), colour) for colour in ("red", "blue")]
    for kind in ("GIF", "WEBP", "PNG"):
        data = file_of(frames[0], kind, save_all=True, append_images=frames[1:], lossless=True)
        with pytest.warns(UserWarning, match=FIRST_FRAME):
            name = PictureStore(tmp_path).put(data)
        assert pixels_of(PictureStore(tmp_path), name)[0] == [255, 0, 0]


# What is refused


def png_of(width: int, height: int) -> bytes:
    """A PNG file that says that it has this size."""
    data = bytearray(file_of(Image.new("L", (1, 1))))
    data[16:24] = width.to_bytes(4, "big") + height.to_bytes(4, "big")
    import zlib

    data[29:33] = zlib.crc32(data[12:29]).to_bytes(4, "big")
    return bytes(data)


REFUSED = {
    "empty": (b"", "it is empty; give one of PNG, JPEG, GIF, WEBP, BMP"),
    "text": (b"a cat on a mat", "cannot be read; give one of"),
    "page": (b"  <!DOCTYPE html><html>404</html>", "it seems to be a web page"),
    "drawing": (b"<svg xmlns='http://www.w3.org/2000/svg'></svg>", "it seems to be a drawing"),
    "pointer": (b"version https://git-lfs.github.com/spec/v1\noid sha256:0\n", "a pointer of Git LFS"),
    "program": (b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 9 9\n", "cannot be read"),
    "scan": (file_of(Image.new("L", (2, 2)), "TIFF"), "cannot be read"),
    "cut": (file_of(picture(size=(64, 64)))[:900], "cut off or damaged"),
    "cut jpeg": (file_of(picture(size=(64, 64)), "JPEG")[:1500], "cut off or damaged"),
    "bomb": (png_of(2**31 - 1, 2**31 - 1), "the limit is 33,554,432 pixels"),
    "wide": (png_of(2**26, 1), "67,108,864 x 1 pixels; the limit"),
    "scans": (file_of(picture(), "JPEG") + b"\xff\xda" * 500, "the picture is sent in 501 scans; the limit is 500"),
    "long": (bytes(MOST_BYTES + 1), "33,554,433 bytes; the limit is 33,554,432"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_is_no_picture_is_refused_in_a_sentence(tmp_path: Path, name: str) -> None:
    data, expected = REFUSED[name]
    with pytest.raises(LmgymError) as refused:
        PictureStore(tmp_path).put(data)
    assert expected in str(refused.value) and str(refused.value).startswith("the picture ")
    assert "\n" not in str(refused.value) and not list(tmp_path.iterdir())


def test_hostile_files_are_refused_or_read_and_raise_nothing_else(tmp_path: Path) -> None:
    """As `python -m tests.torture.pictures` tries thousands of."""
    verdicts, findings = torture.campaign(300, 7, tmp_path)
    assert not findings
    assert min(verdicts["read"], verdicts["refused"]) > 40  # else the mutants are too wild, or too tame


def test_a_file_that_was_read_is_not_unpacked_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Not even by another process, which reads what the first has noted; nor is it believed without its picture."""
    data, other = file_of(picture()), file_of(picture(seed=1))
    name = PictureStore(tmp_path).put(data)
    (tmp_path / "known").open("a").write("no line\n" + "0" * 64 + "\n")
    calls = []
    usual = store_module._decoded
    monkeypatch.setattr(store_module, "_decoded", lambda *given: calls.append(1) or usual(*given))
    again = PictureStore(tmp_path)
    assert [again.put(data) for _ in range(2)] == [name, name] and not calls
    assert again.put(other) == again.put(other) != name and len(calls) == 1
    (tmp_path / name[:2] / f"{name}.png").unlink()
    assert again.put(data) == name and len(calls) == 2 and pixels_of(again, name)
    # A note that leads elsewhere is not written through.
    (tmp_path / "b").mkdir()
    (tmp_path / "b" / "known").symlink_to(tmp_path / "victim")
    assert PictureStore(tmp_path / "b").put(data) == name and not (tmp_path / "victim").exists()


def test_names_from_elsewhere_lead_nowhere(tmp_path: Path) -> None:
    store = PictureStore(tmp_path / "pictures")
    name = store.put(file_of(picture()))
    (tmp_path / "secret.png").write_bytes(file_of(picture(seed=1)))
    for hostile in (
        "",
        "..",
        "../secret",
        "*" * 10,
        name[:9],
        "/etc/passwd",
        f"{name[:2]}/../{name}",
        name[:10] + "\0",
    ):
        with pytest.raises(LmgymError, match="has 0 of the name"):
            store.open(hostile)
    # A file that shows something else, is none, or is a link out of the folder.
    path = store.folder / name[:2] / f"{name}.png"
    path.write_bytes(file_of(picture(seed=1)))
    with pytest.raises(LmgymError, match="does not show the picture of its name"):
        store.open(name)
    path.write_bytes(b"")
    with pytest.raises(LmgymError, match=r"cannot read the picture .*it is empty"):
        store.open(name)
    path.unlink()
    path.symlink_to(tmp_path / "secret.png")
    with pytest.raises(LmgymError, match="it is a link"):
        store.open(name)


def test_a_folder_that_is_a_link_gets_no_picture(tmp_path: Path) -> None:
    (tmp_path / "elsewhere").mkdir()
    os.symlink(tmp_path / "elsewhere", tmp_path / "pictures")
    with pytest.raises(LmgymError, match=r"cannot be written to .*its folder is a link"):
        PictureStore(tmp_path / "pictures").put(file_of(picture()))
    assert not list((tmp_path / "elsewhere").iterdir())


def test_two_pictures_that_ids_could_not_tell_apart_are_refused(tmp_path: Path) -> None:
    store = PictureStore(tmp_path)
    name = store.put(file_of(picture()))
    twin = name[:10] + "0" * 54
    (tmp_path / name[:2] / f"{name}.png").rename(tmp_path / name[:2] / f"{twin}.png")
    with pytest.raises(LmgymError, match="the same first 10 digits as another"):
        store.put(file_of(picture()))


def test_what_an_environment_draws_is_a_text(tmp_path: Path) -> None:
    keep_pictures_in(tmp_path)
    drawn = np.zeros((20, 30, 3), np.uint8)
    for one in (drawn, Image.fromarray(drawn), file_of(Image.fromarray(drawn)), drawn[:, :, :1], drawn[:, :, 0]):
        text = shown(one)
        assert text == PICTURE and len(pictures_of(text)) == 1
    assert len(list(tmp_path.rglob("*.png"))) == 1
    small = pictures_of(shown(drawn, pixels=15))[0][1]
    assert PictureStore(tmp_path).open(small).size == (15, 10)
    for wrong in (drawn.astype(float), "a.png", None, np.zeros((0, 0, 3), np.uint8), np.zeros((3, 3, 7), np.uint8)):
        with pytest.raises(LmgymError, match="picture"):
            shown(wrong)


# Texts


def two() -> str:
    return RecipeText.join("see ", picture_text(ONE), " and ", RecipeText("<eos>"), picture_text(OTHER), "?")


def test_texts_keep_their_pictures_where_they_are_joined() -> None:
    text = two()
    assert text == f"see {PICTURE} and <eos>{PICTURE}?" and pictures_of(text) == ((4, ONE), (15, OTHER))
    assert getattr(text, "spans", ()) == ((10, 15),)
    assert around_pictures(text) == ["see ", PICTURE, " and <eos>", PICTURE, "?"]
    assert [pictures_of(one) for one in around_pictures(text)[1::2]] == [((0, ONE),), ((0, OTHER),)]
    assert getattr(around_pictures(text)[2], "spans", ()) == ((5, 10),)
    for begin in range(len(text)):
        for end in range(begin, len(text) + 1):
            parts = [part_of(text, 0, begin), part_of(text, begin, end), part_of(text, end, len(text))]
            again = RecipeText.join(*parts)
            assert (str(again), pictures_of(again)) == (str(text), pictures_of(text))
    # A plain text is none, and so is a place without the character.
    assert pictures_of(text + "") == () == pictures_of(f"{text}") == pictures_of(RecipeText("ab", (), [(1, ONE)]))


def test_prompts_with_other_pictures_are_other_prompts() -> None:
    prompts = [RecipeText.join(picture_text(name), "How many?") for name in (ONE, OTHER)]
    assert told_apart(prompts[0]) != told_apart(prompts[1])
    assert told_apart([{"role": "user", "content": prompts[0]}]) != told_apart(
        [{"role": "user", "content": prompts[1]}]
    )
    assert told_apart("2+2=") == "2+2=" and told_apart([{"role": "user", "content": "a"}]) == str(
        [{"role": "user", "content": "a"}]
    )


@pytest.mark.parametrize(
    "prompt",
    [
        two(),
        BarePrompt(two(), (), "text", pictures_of(two())),
        [{"role": "system", "content": RecipeText("Look.")}, {"role": "user", "content": two()}],
    ],
)
def test_files_and_processes_keep_pictures(prompt: Any) -> None:
    def same(one: Any) -> None:
        told = [one] if isinstance(one, str) else [message["content"] for message in one]
        was = [prompt] if isinstance(prompt, str) else [message["content"] for message in prompt]
        assert told == was and [*map(pictures_of, told)] == [*map(pictures_of, was)]
        assert type(one) is type(prompt) and getattr(one, "spans", 0) == getattr(prompt, "spans", 0)

    example = Example("a/0", prompt)
    same(Example.from_json(json.loads(json.dumps(example.to_json()))).prompt)
    messages = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt
    episode = Episode(example, 0, 0, [Turn(piece_ids(ONE, 3), [5], [-0.1])], messages=messages)
    again = Episode.from_json(json.loads(json.dumps(episode.to_json())))
    assert again == episode and pictures_of(again.messages[-1]["content"]) == pictures_of(two())
    assert again.turns[0].prompt_ids == piece_ids(ONE, 3)
    same(from_json(json.loads(json.dumps(to_json(Opening(prompt))))).prompt)
    step = from_json(json.loads(json.dumps(to_json(Step(messages)))))
    assert pictures_of(step.messages[-1]["content"]) == pictures_of(two())


def test_options_of_a_task_keep_pictures() -> None:
    example = Example("a/0", RecipeText.join(picture_text(ONE), "How many?"), ("3",))
    [written] = with_options([example], ("Look: ", "\n"), "Count.", None, [example], 0)
    assert pictures_of(written.prompt[1]["content"]) == ((6, ONE),)  # type: ignore[index]
    [chat] = in_form([example], "data", "auto")  # a text with a picture is a message of the user
    assert pictures_of(chat.prompt[0]["content"]) == ((0, ONE),)  # type: ignore[index]
    [text] = in_form([example], "data", "text")
    assert isinstance(text.prompt, BarePrompt) and pictures_of(text.prompt) == ((0, ONE),)


# Ids. What a model makes of a picture is stood in for by a mark, four pieces and a mark.

MARKS = ("<image>", "<|vision_start|>", "<|image_pad|>", "<|vision_end|>", "<|im_end|>")
HEAD = "{% for message in messages %}<|im_start|>{{ message.role }}\n"
TAIL = "<|im_end|>\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
PARTS = (
    "{% for part in message.content %}{% if part.type == 'image' %}MARK{% else %}{{ part.text }}{% endif %}{% endfor %}"
)
EITHER = "{% if message.content is string %}{{ message.content }}{% else %}" + PARTS + "{% endif %}"
FIRST_PICTURES = (  # as LLaVA-OneVision's: pictures before the words
    "{% for part in message.content | selectattr('type', 'equalto', 'image') %}<image>\n{% endfor %}"
    "{% for part in message.content | selectattr('type', 'equalto', 'text') %}{{ part.text }}{% endfor %}"
)
TEMPLATES = {
    "qwen": (HEAD + EITHER.replace("MARK", "<|vision_start|><|image_pad|><|vision_end|>") + TAIL, False),
    "smolvlm": (HEAD + PARTS.replace("MARK", "<image>") + TAIL, True),
    "llava": (HEAD + FIRST_PICTURES + TAIL, True),
    "texts": (HEAD + "{{ message.content }}" + TAIL, False),
    "trimming": (HEAD + "{{ message.content | trim }}" + TAIL, False),
}


def eyes(template: str | None, sees: bool = True) -> Any:
    """A tokenizer of bytes, of a model that sees a picture as <vision_start>, four pieces and <vision_end>."""
    tokenizer = models.byte_tokenizer()
    tokenizer.add_special_tokens({"additional_special_tokens": ["<|im_start|>", *MARKS]})
    tokenizer.chat_template = template
    if sees:
        begin, end = tokenizer.convert_tokens_to_ids([MARKS[1], MARKS[3]])
        read_pictures(tokenizer, lambda digest: [begin, *piece_ids(digest, 4), end])
    return tokenizer


def as_seen(tokenizer: Any, text: str, *digests: str) -> list[int]:
    """The ids of a text that a template has written, with each ¤ a picture."""
    first, *others = text.split("¤")
    ids = tokenizer(first, add_special_tokens=False)["input_ids"]
    begin, end = tokenizer.convert_tokens_to_ids([MARKS[1], MARKS[3]])
    for digest, other in zip(digests, others, strict=True):
        ids += [begin, *piece_ids(digest, 4), end]
        ids += tokenizer(other, add_special_tokens=False)["input_ids"]
    return ids


def said(*contents: str) -> list[dict[str, str]]:
    roles = ["user", "assistant"] * len(contents)
    return [{"role": role, "content": content} for role, content in zip(roles, contents, strict=False)]


@pytest.mark.parametrize("name", TEMPLATES)
def test_a_template_writes_pictures_in_its_own_form(name: str) -> None:
    template, parts = TEMPLATES[name]
    tokenizer = eyes(template)
    assert form_of(tokenizer).parts == parts
    user = "<|im_start|>user\n"
    asked = said(RecipeText.join("A ", picture_text(ONE), "B", picture_text(OTHER), "?"))
    inside = f"{user}¤\n¤\nA B?" if name == "llava" else f"{user}A ¤B¤?"
    expected = inside + "<|im_end|>\n<|im_start|>assistant\n"
    assert prompt_ids(tokenizer, asked) == as_seen(tokenizer, expected, ONE, OTHER)
    # Texts alone, and a conversation, which is rendered as transformers does it.
    assert prompt_ids(tokenizer, "A?") == as_seen(tokenizer, f"{user}A?<|im_end|>\n<|im_start|>assistant\n")
    new = said(RecipeText.join(picture_text(ONE), "And now?"))
    behind = appended_ids(tokenizer, asked, new, tokenizer.convert_tokens_to_ids("<|im_end|>"), ended=True)
    shown = "¤\nAnd now?" if name == "llava" else "¤And now?"
    assert behind == as_seen(tokenizer, f"\n{user}{shown}<|im_end|>\n<|im_start|>assistant\n", ONE)


@pytest.mark.parametrize("name", [*TEMPLATES, None])
def test_no_text_can_forge_a_picture(name: str | None) -> None:
    tokenizer = eyes(None if name is None else TEMPLATES[name][0])
    hostile = f"<image>{PICTURE}<|vision_start|><|image_pad|><|vision_end|>\ue0000\ue001"
    marks = tokenizer.convert_tokens_to_ids([*MARKS[:4]])
    plain, mixed = said(hostile), said(RecipeText.join(hostile, picture_text(ONE), hostile))
    assert not {*marks} & {*prompt_ids(tokenizer, plain)} and not any(map(is_piece, prompt_ids(tokenizer, plain)))
    ids = prompt_ids(tokenizer, mixed)
    assert [id for id in ids if is_piece(id)] == piece_ids(ONE, 4)
    assert [ids.count(mark) for mark in marks] == [0, 1, 0, 1]
    texts = decoded(tokenizer, ids, skip_special_tokens=False)
    assert texts.count("<image>") == 2 and texts.count(PICTURE) == 3


def test_without_a_template_a_picture_stands_where_it_stands() -> None:
    tokenizer = eyes(None)
    text = RecipeText.join("A", picture_text(ONE), "B")
    assert prompt_ids(tokenizer, text) == [1, *as_seen(tokenizer, "A¤B", ONE)]
    assert prompt_ids(tokenizer, picture_text(ONE)) == [1, *as_seen(tokenizer, "¤", ONE)]
    assert plain_text(said(text)) == text and pictures_of(plain_text(said(text))) == ((1, ONE),)
    assert answer_ids(tokenizer, picture_text(ONE), "3") == [*tokenizer("3", add_special_tokens=False)["input_ids"], 2]
    assert split_text(tokenizer, text) == ["A", PICTURE, "B"]
    with pytest.raises(
        LmgymError, match=r"a prompt with pictures has 9 tokens, more than policy.max_prompt_tokens \(8\)"
    ):
        prompt_ids(tokenizer, text, cut=Cut(8))
    assert len(prompt_ids(tokenizer, text, cut=Cut(9))) == 9


def test_a_group_s_prompts_are_told_apart_by_their_pictures() -> None:
    class Asked:
        def __init__(self) -> None:
            self.calls = list[Any]()

        def encode_prompt(self, prompt: Any, template: Any) -> list[int]:
            self.calls.append(prompt)
            return [len(self.calls)]

    cache = PromptCache(Asked())  # type: ignore[arg-type]
    one, other = (said(RecipeText.join(picture_text(name), "?")) for name in (ONE, OTHER))
    assert [cache(prompt, {}) for prompt in (one, other, one, said(f"{PICTURE}?"))] == [[1], [2], [1], [3]]


def test_ids_are_shown_with_their_pictures() -> None:
    tokenizer = eyes(TEMPLATES["qwen"][0])
    assert reads_pictures(tokenizer) and not reads_pictures(models.byte_tokenizer())
    ids = as_seen(tokenizer, "é¤b¤", ONE, OTHER)
    pieces = token_texts(tokenizer, ids)
    assert "".join(pieces) == decoded(tokenizer, ids, skip_special_tokens=False)
    assert pieces == ["", "é", MARKS[1], PICTURE, "", "", "", MARKS[3], "b", MARKS[1], PICTURE, "", "", "", MARKS[3]]
    read = prompt_as_read(tokenizer, ids).replace(MARKS[1], "B").replace(MARKS[3], "E")
    assert read == "é⟦B⟧⟦picture 1111111111: 4 tokens⟧⟦E⟧b⟦B⟧⟦picture 2222222222: 4 tokens⟧⟦E⟧"
    # Traces hold them.
    row = row_of_turns([Turn(ids, [5], [-0.5])])
    assert unpacked(json.loads(json.dumps(packed(row.tokens)))).tolist() == [*ids, 5]
    assert row_of_turns([Turn([3], [5], [-0.5])]).tokens.dtype == np.int32


def test_a_model_without_eyes_is_told_so() -> None:
    for template in (None, *(template for template, _ in TEMPLATES.values())):
        with pytest.raises(
            LmgymError, match="a prompt holds a picture, and the model sees none: take a vision-language"
        ):
            prompt_ids(eyes(template, sees=False), said(RecipeText.join(picture_text(ONE), "?")))


def test_a_template_that_loses_or_repeats_pictures_is_refused() -> None:
    twice = HEAD + EITHER.replace("MARK", "<image>") * 2 + TAIL
    with pytest.raises(LmgymError, match="writes 2 pictures where the messages hold 1"):
        prompt_ids(eyes(twice), said(picture_text(ONE)))
    lost = HEAD + EITHER.replace("MARK", "{% if not loop.first %}<image>{% endif %}") + TAIL
    assert form_of(eyes(lost)).mark == "<image>"
    with pytest.raises(LmgymError, match="writes 0 pictures where the messages hold 1"):
        prompt_ids(eyes(lost), said(picture_text(ONE)))
    open_mark = HEAD + EITHER.replace("MARK", "[PICTURE]") + TAIL
    with pytest.raises(LmgymError, match=r"writes '\[PICTURE\]' for a picture, which is no control token"):
        prompt_ids(eyes(open_mark), said(picture_text(ONE)))
