"""vLLM servers that run elsewhere on this machine, or behind a tunnel or proxy of yours (docs/engines.md).

The weights are written to a folder that the servers can read, and every server loads them. Servers that take adapters
get the base model once, and then only the adapters. Only HTTP: vLLM is not imported."""

import copy
import json
import secrets
import shutil
import urllib.error
import urllib.request
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from safetensors.torch import save_file

from lmgym.core.errors import LmgymError
from lmgym.core.files import usual_modes
from lmgym.distributed.ranks import ALONE, Ranks
from lmgym.inference.vllm.engine import Query, Sampled, weights_of
from lmgym.inference.vllm.pictures import as_address
from lmgym.models import lora
from lmgym.models.policy import Policy

STARTED_SO = (
    "start it so: VLLM_SERVER_DEV_MODE=1 python -m vllm.entrypoints.openai.api_server --model MODEL "
    "--enable-scale-out --logprobs-mode processed_logprobs"
)
LOAD_ADAPTER, UNLOAD_ADAPTER = "/v1/load_lora_adapter", "/v1/unload_lora_adapter"
PLAIN = (LOAD_ADAPTER, UNLOAD_ADAPTER)  # answered by a sentence, not by JSON
Answer = dict[str, Any]


class Servers:
    """The servers at `addresses`; answers are dealt out to them in turn, at most `rows` at a time.

    `folder` is where the weights are written, for this process and the servers alike. `seconds` is the limit of one
    request. Of several `ranks` the first one pushes, and adapters are merged: the others do not know their name.

    Example: VLLM(policy, Servers(["http://127.0.0.1:8000"], Path("runs/a/served")))"""

    remedy = STARTED_SO

    def __init__(
        self, addresses: Sequence[str], folder: Path, rows: int = 256, seconds: float = 600.0, ranks: Ranks = ALONE
    ) -> None:
        self.addresses, self.folder = [one.rstrip("/") for one in addresses], folder.absolute()
        self.seconds, self.ranks = seconds, ranks
        self.takes_adapters = False
        self._adapter = ""  # the name of the newest one; empty: the model itself is asked
        self._threads = ThreadPoolExecutor(rows, thread_name_prefix="vllm")

    def reach(self, policy: Policy) -> int:
        if policy.vision is not None:
            self.remedy = f"{STARTED_SO} --no-mm-device-do-normalize"  # else a push undoes what it folds into weights
        alone = self.ranks.size == 1 and lora.has_adapter(policy.model) and policy.vision is None
        self.takes_adapters = alone and all(LOAD_ADAPTER in self._paths(one) for one in self.addresses)
        return min(int(self._ask(one, "/v1/models")["data"][0]["max_model_len"]) for one in self.addresses)

    def sample(self, queries: Sequence[Query], first: int) -> Iterator[Sampled]:
        turns = range(first, first + len(queries))
        addresses = [self.addresses[turn % len(self.addresses)] for turn in turns]
        model = {"model": self._adapter} if self._adapter else {}
        images = {id(image): image for one in queries for image in one.pictures}
        parts = {key: {"type": "image_url", "url": as_address(image)} for key, image in images.items()}
        bodies = [
            {"token_ids": one.ids, "sampling_params": dict(one.settings), **model, **_pictures(one, parts)}
            for one in queries
        ]
        paths = ["/inference/v1/generate"] * len(bodies)
        return map(_sampled, self._threads.map(self._ask, addresses, paths, bodies))

    def push(self, policy: Policy, version: int) -> None:
        """Write what is new, and let each server finish what it does, load that, forget what it cached with the old
        weights, and go on."""
        calls: list[tuple[str, Answer]] = []
        old = self._adapter
        if not old:
            write_weights(policy, self.folder, merge=not self.takes_adapters)
            path = {"weights_path": str(self.folder)}
            calls.append(("/collective_rpc", {"method": "reload_weights", "kwargs": path}))
        if self.takes_adapters:
            self._adapter = f"lmgym-{secrets.token_hex(8)}"  # a new name: nothing of the old one is cached
            lora.save(policy.model, self.folder / self._adapter)
            calls.append((LOAD_ADAPTER, {"lora_name": self._adapter, "lora_path": str(self.folder / self._adapter)}))
        if old:
            calls.append((UNLOAD_ADAPTER, {"lora_name": old}))
        if policy.vision is not None:
            calls.append(("/reset_encoder_cache", {}))  # features of pictures
        list(self._threads.map(lambda address: self._load(address, calls, version), self.addresses))
        if old:
            shutil.rmtree(self.folder / old)

    def instead_of_rounding(self, policy: Policy) -> str:
        return "" if self.takes_adapters else "start the servers with --enable-lora, or with --dtype float32"

    def apart(self) -> Sequence[tuple[str, "Servers"]]:
        alone = [copy.copy(self) for _ in self.addresses]
        for one, address in zip(alone, self.addresses, strict=True):
            one.addresses = [address]
        return list(zip(self.addresses, alone, strict=True))

    def close(self) -> None:
        """Remove the written weights. The servers go on."""
        self._threads.shutdown(wait=False, cancel_futures=True)
        if self.ranks.first:
            shutil.rmtree(self.folder, ignore_errors=True)

    def _load(self, address: str, calls: Sequence[tuple[str, Answer]], version: int) -> None:
        paused = [("/pause?mode=wait", {}), *calls, ("/reset_prefix_cache", {})]
        for path, body in [*paused, ("/update_weight_version", {"new_version": str(version)}), ("/resume", {})]:
            self._ask(address, path, body)

    def _paths(self, address: str) -> Mapping[str, Any]:
        """What a server can be asked for; nothing if it does not say."""
        try:
            return dict(self._ask(address, "/openapi.json").get("paths", {}))
        except LmgymError:
            return {}

    def _ask(self, address: str, path: str, body: Mapping[str, Any] | None = None) -> Answer:
        """The JSON that a server answers, within the time limit."""
        data = None if body is None else json.dumps(body).encode()
        request = urllib.request.Request(address + path, data, {"Content-Type": "application/json"})
        opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
        try:
            with opener.open(request, timeout=self.seconds) as response:
                said = response.read()
                return {} if path in PLAIN else json.loads(said or b"{}")
        except urllib.error.HTTPError as error:
            with error:
                said = " ".join(error.read().decode(errors="replace").split())[:300]
            hint = f"; {STARTED_SO}" if error.code == 404 else ""
            if error.code == 500:
                hint = "; its log says why (on a processor it needs --no-enable-chunked-prefill); start it again"
            if path == LOAD_ADAPTER:
                hint = "; start it with --enable-lora and a --max-lora-rank of policy.lora_rank or more"
            if error.code == 400 and body and (wanted := body.get("sampling_params", {}).get("logprobs")):
                hint = f"; sampling.top_k needs a server that was started with --max-logprobs {wanted} or more"
            raise LmgymError(f"engine.address: {address}{path} answered {error.code} ({said}){hint}") from error
        except (OSError, ValueError) as error:  # also a time limit, and a connection that ends
            raise LmgymError(
                f"engine.address: no vLLM answers at {address} ({type(error).__name__}: {error}); start it again, then "
                "resume the run"
            ) from error


def write_weights(policy: Policy, folder: Path, merge: bool = True) -> None:
    """Write the policy's weights as vLLM loads them (`weights_of`), whole or not at all."""
    hidden = folder.with_name(folder.name + ".new")
    shutil.rmtree(hidden, ignore_errors=True)
    hidden.mkdir(parents=True)
    tensors = {name: tensor.cpu().contiguous().clone() for name, tensor in weights_of(policy, merge).items()}
    save_file(tensors, hidden / "model.safetensors")
    usual_modes(hidden)  # a server may be another user's
    config = copy.deepcopy(policy.model.config)
    config.architectures = [type(policy.model).__name__]  # a model made from scratch has none
    config.save_pretrained(hidden)
    shutil.rmtree(folder, ignore_errors=True)
    hidden.rename(folder)


def _pictures(query: Query, parts: Mapping[int, Answer]) -> Answer:
    """What a request says of its prompt's pictures; nothing if there are none."""
    own = [parts[id(image)] for image in query.pictures]
    return {"content_parts": own, "return_token_ids": True} if own else {}


def _sampled(answer: Answer) -> Sampled:
    """What a server has sampled."""
    try:
        choice = answer["choices"][0]
        ids, content = [int(token) for token in choice["token_ids"]], choice["logprobs"]["content"]
        tables = [place["top_logprobs"] for place in content]
        likeliest = [[(int(entry["token_id"]), float(entry["logprob"])) for entry in table] for table in tables]
        versions = {str(entry["version"]) for entry in choice["weight_versions"]}
        logprobs = [float(entry["logprob"]) for _, entry in zip(ids, content, strict=True)]
        return Sampled(ids, logprobs, likeliest, versions, answer.get("prompt_token_ids") or [])
    except (KeyError, IndexError, TypeError, ValueError) as error:
        reason = f"{type(error).__name__}: {error}"
        raise LmgymError(f"a vLLM server sent another answer than expected ({reason})") from error
