"""Without a network: names of the Hub get one sentence without a wait, and what the local cache holds still loads."""

import importlib
import os
import shutil
import socket
from pathlib import Path

import pytest

from lmgym.core import hub
from lmgym.core.errors import LmgymError
from lmgym.models.load import load_policy
from lmgym.models.model_info import load_tokenizer
from lmgym.models.policy_section import PolicySection
from lmgym.tasks.base import load_task
from tests import runs
from tests.runs import complaint


@pytest.fixture
def no_network(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The Hub is a port where nobody listens, and its cache a folder (returned) of the test."""
    constants = importlib.import_module("huggingface_hub.constants")
    for name in (*hub.OFFLINE, "http_proxy", "HTTP_PROXY", "all_proxy", "ALL_PROXY"):
        monkeypatch.setenv(name, "0")  # so that it is taken back at the end
        monkeypatch.delenv(name)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        monkeypatch.setenv("HF_ENDPOINT", f"http://127.0.0.1:{free.getsockname()[1]}")
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "cache"))
    hub.answers.cache_clear()
    return tmp_path / "cache"


def test_whether_something_listens() -> None:
    with socket.socket() as server:
        server.bind(("127.0.0.1", 0))
        address = server.getsockname()
        assert not hub.answers.__wrapped__(address)
        server.listen()
        assert hub.answers.__wrapped__(address)


def test_a_hub_id_gets_one_sentence(no_network: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    sentence = "cannot be reached, and it is not in the local cache"
    recipe = runs.write(tmp_path / "r.yaml", policy={"model": "some/model", "device": "cpu"})
    for verb in ("train", "check", "eval"):
        said = complaint(capsys, verb, recipe)
        assert said.startswith("policy.model: could not load 'some/model'") and said.endswith(sentence), said
    with pytest.raises(LmgymError, match=rf"policy\.tokenizer: could not load 'some/words'.*{sentence}"):
        load_tokenizer(PolicySection(model=str(tmp_path), tokenizer="some/words"))
    pytest.importorskip("datasets")
    with pytest.raises(LmgymError, match=rf"task\.hub_id: .*{sentence}"):
        load_task("gsm8k", "train", hub_id="some/data")


def test_a_model_in_the_local_cache_loads(no_network: Path, tmp_path: Path) -> None:
    load_policy(PolicySection(model="builtin:tiny_gpt2", device="cpu")).save_pretrained(tmp_path / "model")
    kept = no_network / "models--some--model"
    shutil.copytree(tmp_path / "model", kept / "snapshots" / ("0" * 40))
    (kept / "refs").mkdir()
    (kept / "refs" / "main").write_text("0" * 40)
    assert load_policy(PolicySection(model="some/model", device="cpu")).model.config.model_type == "gpt2"
    assert os.environ["HF_HUB_OFFLINE"] == "1"


def test_a_users_own_setting_is_kept(no_network: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hub, "answers", lambda *_: pytest.fail("it looked for the Hub"))
    monkeypatch.setenv("HF_HUB_OFFLINE", "0")
    hub.prepare_hub("some/model")
    assert hub.unreachable() == "" and os.environ["HF_HUB_OFFLINE"] == "0"


def test_a_switch_of_either_name_is_said(no_network: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """huggingface_hub goes offline by either one."""
    hub.answers.cache_clear()
    monkeypatch.delenv("HF_HUB_OFFLINE", raising=False)
    monkeypatch.setenv("TRANSFORMERS_OFFLINE", "1")
    assert hub.unreachable().startswith("TRANSFORMERS_OFFLINE is set")
