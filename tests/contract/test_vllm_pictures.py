"""Pictures in what vLLM is asked for: a mark in place of a picture's ids, the picture beside it, and what vLLM has read
of the prompt, which must be lmgym's ids. Without vLLM; tests/parity/test_vllm.py asks a real one."""

import base64
import io
from pathlib import Path

import pytest
from PIL import Image

from lmgym.core.errors import LmgymError
from lmgym.inference.vllm import pictures
from lmgym.models.load import load_policy
from lmgym.models.picture_features import PictureReader
from lmgym.models.policy_section import PolicySection
from lmgym.models.vision import placeholder_of
from tests import vision_models


@pytest.mark.parametrize("family", ["idefics3", "llava_onevision", "qwen2_5_vl"])
def test_a_prompt_comes_back_as_it_was(family: str, tmp_path: Path) -> None:
    """Two pictures beside each other and one more: each is one mark, of which vLLM makes what lmgym has read."""
    policy = load_policy(PolicySection(model=str(vision_models.write(family, tmp_path)), device="cpu"))
    assert policy.vision is not None
    reader, drawn = policy.vision.reader, vision_models.Drawn()
    reader.pictures = drawn
    one, other = drawn.draw(1, 40, 24), drawn.draw(2, 16, 32)
    ids = [list(reader.tokens_of(digest, drawn.open(digest))) for digest in (one, other)]
    prompt = [1, 50, *ids[0], *ids[1], 51, *ids[0], 52]
    sent, names = pictures.as_sent(reader, prompt)
    assert names == [one[:10], other[:10], one[:10]]
    assert len(sent) < len(prompt) and sent.count(placeholder_of(reader.processor)) == 3
    mark = pictures.as_sent(reader, ids[0])[0]
    read = expanded(reader, sent, names, edge=len(mark) // 2)
    assert read == pictures.as_read(reader, prompt) and max(read) < policy.vocabulary
    pictures.check_read(reader, prompt, read)
    with pytest.raises(
        LmgymError, match=rf"as {len(read) - 1} tokens, and lmgym as {len(read)}; they part at token 5:"
    ):
        pictures.check_read(reader, prompt, [*read[:4], 99, *read[6:]])
    with pytest.raises(LmgymError, match="does not say what it has read"):
        pictures.check_read(reader, prompt, [])
    with pytest.raises(LmgymError, match="a part of the picture"):
        pictures.as_sent(reader, prompt[len(ids[0]) :])
    assert pictures.as_sent(reader, [1, 50, 51]) == ([1, 50, 51], [])


def expanded(reader: PictureReader, sent: list[int], names: list[str], edge: int) -> list[int]:
    """What vLLM makes of the placeholders; `edge` tokens on both sides of a picture were sent, too (Qwen's)."""
    own = (reader.tokens(name) for name in names)
    placeholder, read = placeholder_of(reader.processor), list[int]()
    for id in sent:
        tokens = next(own) if id == placeholder else [id]
        read += tokens[edge : len(tokens) - edge] if id == placeholder else tokens
    return read


def test_what_vllm_cannot_be_sent_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(LmgymError, match=r"engine\.name: vLLM itself writes the line breaks around .* a gemma3"):
        pictures.check_pictures("gemma3", here=False)
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(LmgymError, match=r"no qwen2_5_vl without torchvision, .* built for your torch, or write name"):
        pictures.check_pictures("qwen2_5_vl", here=True)
    pictures.check_pictures("qwen2_5_vl", here=False)
    pictures.check_pictures("idefics3", here=True)


def test_a_picture_s_address_shows_its_pixels() -> None:
    image = Image.linear_gradient("L").resize((9, 7)).convert("RGB")
    address = pictures.as_address(image)
    kind, data = address.split(",", 1)
    assert kind == "data:image/png;base64"
    assert Image.open(io.BytesIO(base64.b64decode(data))).tobytes() == image.tobytes()
