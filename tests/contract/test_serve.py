"""`lmgym serve`: a model answers clients, and what it answers is what its engine samples for that prompt."""

import json
import os
import re
import signal
import subprocess
import sys
import threading
import urllib.error
import urllib.request
from pathlib import Path
from typing import Any

import pytest

from lmgym.cli.main import main
from lmgym.core import seeds
from lmgym.gateway.server import Gateway
from lmgym.gateway.session import Mailbox
from lmgym.inference.base import Request, Sampling
from lmgym.inference.sampler import Sampler
from lmgym.models.policy import Policy
from lmgym.rollouts.actor import Actor
from lmgym.rollouts.serving import Serving
from lmgym.text.chat import decode
from lmgym.types import BarePrompt
from tests import models, runs

ADD = {"type": "function", "function": {"name": "add", "parameters": {"type": "object", "properties": {}}}}


def ask(variables: dict[str, str], form: str, **body: Any) -> Any:
    request = urllib.request.Request(
        f"{variables['OPENAI_BASE_URL']}/{form}",
        json.dumps(body).encode(),
        {"Authorization": f"Bearer {variables['OPENAI_API_KEY']}"},
    )
    with urllib.request.urlopen(request, timeout=60) as reply:
        return json.load(reply)


def user(text: str) -> list[dict[str, str]]:
    return [{"role": "user", "content": text}]


def test_an_answer_is_what_the_engine_samples() -> None:
    policy = Policy(models.sharpen(models.llama(max_position_embeddings=128), 0.12), models.byte_tokenizer())
    actor, sampling = Actor(Sampler(policy, 8), policy.tokenizer), Sampling(max_new_tokens=6, temperature=0.8)
    gateway, mailbox = Gateway(), Mailbox[None]()
    address, key = gateway.open(mailbox, ())
    variables = {"OPENAI_BASE_URL": address, "OPENAI_API_KEY": key}
    serving = threading.Thread(target=Serving(actor, sampling, 7).run, args=(mailbox,), daemon=True)
    serving.start()
    said = [
        ask(variables, "chat/completions", messages=user("a"), n=2, logprobs=True),
        ask(variables, "completions", prompt="a"),
        ask(variables, "messages", messages=user("a"), max_tokens=5, tools=[]),
        *(ask(variables, "chat/completions", messages=user("a"), seed=3) for _ in range(2)),
        ask(variables, "completions", prompt="a", seed=3),
    ]
    with pytest.raises(urllib.error.HTTPError) as refused:
        ask(variables, "chat/completions", messages=user("a" * 200))
    assert "and the model reads 128 at most" in refused.value.read().decode()
    mailbox.end(None)
    serving.join(20)
    assert not serving.is_alive()
    # The same, asked of the engine.
    chat, bare = (actor.encode_prompt(prompt) for prompt in (user("a"), BarePrompt("a")))
    asked = [(1, 0, chat), (1, 1, chat), (2, 0, bare), (3, 0, chat)]
    parent = seeds.key(7, "serve")
    requests = [Request(tuple(ids), seeds.key(number, choice, parent=parent)) for number, choice, ids in asked]
    requests += [Request(tuple(ids), seeds.key("seed", 3, 0, parent=parent)) for ids in (chat, bare)]
    expected = actor.engine.generate(requests, sampling)
    texts = [decode(policy.tokenizer, one.ids) for one in expected]
    assert [choice["message"]["content"] for choice in said[0]["choices"]] == texts[:2]
    seen = [token["logprob"] for token in said[0]["choices"][0]["logprobs"]["content"]]
    assert seen == pytest.approx(expected[0].logprobs[: len(seen)], abs=2e-5) and seen
    assert said[1]["choices"][0]["text"] == texts[2]
    assert "".join(block["text"] for block in said[2]["content"]) == texts[3]
    assert [one["choices"][0]["message"]["content"] for one in said[3:5]] == [texts[4]] * 2
    assert said[5]["choices"][0]["text"] == texts[5]
    assert said[0]["usage"]["prompt_tokens"] == len(chat) and said[1]["usage"]["prompt_tokens"] == len(bare)
    assert said[2]["usage"] == {"input_tokens": len(chat), "output_tokens": len(expected[3].ids)}


@pytest.mark.slow
@pytest.mark.processes
def test_a_trained_run_is_served_until_ctrl_c(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    run = runs.run(tmp_path / "run", steps=1)
    assert main(["serve", str(run), "--ignored", "messages"]) == 1
    assert "--ignored may name temperature" in capfd.readouterr().err
    assert main(["serve", str(run), "--port", "-1"]) == 1
    assert "port -1 of this machine cannot be used" in capfd.readouterr().err
    words = [sys.executable, "-m", "lmgym", "serve", str(run), "--port", "0", "--ignored", "temperature"]
    path = os.pathsep.join([str(runs.ROOT), os.environ.get("PYTHONPATH", "")])
    with subprocess.Popen(words, stdout=subprocess.PIPE, text=True, env={**os.environ, "PYTHONPATH": path}) as server:
        try:
            assert server.stdout is not None
            told = "".join(server.stdout.readline() for _ in range(5))
            variables = dict(re.findall(r"export (\w+)=(\S+)", told))
            assert len(variables) == 4 and variables["ANTHROPIC_BASE_URL"] + "/v1" == variables["OPENAI_BASE_URL"]
            reply = ask(variables, "chat/completions", messages=user("2+2="), temperature=0.3)
            assert isinstance(reply["choices"][0]["message"]["content"], str)
            port = variables["OPENAI_BASE_URL"].split("/")[2].split(":")[1]
            assert main(["serve", str(run), "--port", port]) == 1
            assert f"port {port} of this machine cannot be used" in capfd.readouterr().err
            server.send_signal(signal.SIGINT)
            assert server.wait(60) == 0
        finally:
            server.kill()
