"""Answers from vLLM servers that run elsewhere on this machine, or behind a tunnel or proxy of yours (docs/engines.md).

Token ids go out, ids and their log-probabilities come back. After each update the weights are written to a folder that
the servers can read, and every server loads them. Then a few tokens are sampled and scored again (the canary), so that
a server with old weights is found out before anything is trained on its answers. Only HTTP: vLLM is not imported.
"""

import copy
import json
import math
import shutil
import sys
import urllib.error
import urllib.request
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from lmgym.core.errors import LmgymError
from lmgym.core.registry import register
from lmgym.distributed.ranks import ALONE, Ranks
from lmgym.functional.truncation import Candidates
from lmgym.inference import proof
from lmgym.inference.base import Completion, Decoding, Request, Sampling
from lmgym.inference.completions import Answers, check_request
from lmgym.models import lora
from lmgym.models.policy import Policy
from lmgym.types import Restriction

SPARE = 16  # tokens that may be as likely as the last one that top_k keeps
NEVER = -9999.0  # what a server writes for a log-probability of minus infinity, or that is no number
TEMPERATURE = 0.8  # of the canary: not 1, where log-probabilities of another distribution could look right
STARTED_SO = (
    "VLLM_SERVER_DEV_MODE=1 python -m vllm.entrypoints.openai.api_server --model MODEL --enable-scale-out "
    "--logprobs-mode processed_logprobs"
)
Answer = dict[str, Any]


@register("engine", "vllm")
class VLLM:
    """Samples on the servers at `addresses`, the answers dealt out to them in turn, at most `rows` at a time.

    Of several `ranks`, each asks for its own answers; the first one writes the weights, lets the servers load them and
    tries them. All wait for it, and all raise what any of them has raised.

    `folder` is where the weights are written, for this process and the servers alike. `seconds` is the limit of one
    request, `canary` of the gap between sampled and scored log-probabilities, in nats per token on average. Random
    numbers are the servers' own: answers are not repeated from one run to the next.

    Raises LmgymError for servers that cannot be reached or lack what is asked of them, for an answer of other weights
    than the newest, and if the canary finds a gap.

    Example: VLLM(policy, ["http://127.0.0.1:8000"], Path("runs/a/served"))
    """

    def __init__(
        self,
        policy: Policy,
        addresses: Sequence[str],
        folder: Path,
        rows: int = 256,
        seconds: float = 600.0,
        canary: float = 0.01,
        ranks: Ranks = ALONE,
    ) -> None:
        if policy.encoder_decoder:
            raise LmgymError("engine.name: vllm samples from causal models; write sampler")
        self.policy, self.folder, self.rows = policy, folder.absolute(), rows
        self.addresses, self.seconds, self.canary = [one.rstrip("/") for one in addresses], seconds, canary
        self._pushed, self.ranks = 0, ranks
        self._threads = ThreadPoolExecutor(rows, thread_name_prefix="vllm")
        self._context = policy.context or sys.maxsize
        self._together(self._reach)
        self.load(policy, 0)

    @property
    def context(self) -> int | None:
        return self._context

    def generate(
        self,
        requests: Sequence[Request],
        sampling: Sampling,
        ended: Callable[[int, list[int]], None] | None = None,
    ) -> list[Completion]:
        """One completion per request, in order. Raises LmgymError for top_p, min_p and beams."""
        check_sampling(sampling)
        sampling.check_vocabulary(self.policy.vocabulary)
        for request in requests:
            check_request(self.policy, request)
            if len(request.prompt_ids) >= self._context:
                raise LmgymError(
                    f"a prompt has {len(request.prompt_ids)} tokens, and a vLLM server reads {self._context} at most, "
                    "answer included; start it with a larger --max-model-len"
                )
        answers = Answers(self.policy, requests, sampling)
        rooms = [self._context - len(request.prompt_ids) for request in requests]
        answers.limits = [min(limit, room) for limit, room in zip(answers.limits, rooms, strict=True)]
        bodies = [self._body(answers, number) for number in range(len(requests))]
        turns = range(self.ranks.rank, self.ranks.rank + len(requests))  # each rank begins with another server
        addresses = [self.addresses[turn % len(self.addresses)] for turn in turns]
        paths = ["/inference/v1/generate"] * len(bodies)
        found = self._threads.map(self._ask, addresses, paths, bodies)
        for number, answer in enumerate(found):
            self._take(answers, number, answer)
            if ended is not None:
                ended(number, answers.ids[number])
        return answers.completions()

    def restricted(self, restriction: Restriction, mask: Policy | None = None) -> "VLLM":
        raise LmgymError("engine.name: vllm cannot restrict what is sampled by a frozen policy; write sampler")

    def forget(self, conversations: Sequence[int]) -> None:
        """Nothing to free here: each server decides what it caches of prompts."""

    def load(self, policy: Policy, version: int) -> None:
        """Let every server load the policy's weights, and try them. With adapters the merged weights are sent."""
        self.policy, self._pushed = policy, self._pushed + 1
        self._together(self._renew if self.ranks.first else None)

    def close(self) -> None:
        """Remove the written weights. The servers go on."""
        self._threads.shutdown(wait=False, cancel_futures=True)
        if self.ranks.first:
            shutil.rmtree(self.folder, ignore_errors=True)

    def _together(self, act: Callable[[], None] | None) -> None:
        """Do this rank's part, wait for the other ranks, and raise the first error of any of them."""
        error: LmgymError | None = None
        try:
            if act is not None:
                act()
        except LmgymError as found:
            error = found
        said = [part.decode() for part in self.ranks.gather(str(error or "").encode())]
        if any(said):
            raise LmgymError(next(filter(None, said))) from error

    def _reach(self) -> None:
        """Ask every server for the longest row that it takes."""
        longest = [self._ask(address, "/v1/models")["data"][0]["max_model_len"] for address in self.addresses]
        self._context = min(self._context, *longest)

    def _renew(self) -> None:
        """Write the weights, let all servers load them, and try them."""
        write_weights(self.policy, self.folder)
        list(self._threads.map(self._push, self.addresses))
        self._try()

    def _push(self, address: str) -> None:
        """Let a server finish what it does, load the weights, forget what it cached with the old ones, and go on."""
        self._ask(address, "/pause?mode=wait", {})
        reload = {"method": "reload_weights", "kwargs": {"weights_path": str(self.folder)}}
        self._ask(address, "/collective_rpc", reload)
        self._ask(address, "/reset_prefix_cache", {})
        self._ask(address, "/update_weight_version", {"new_version": str(self._pushed)})
        self._ask(address, "/resume", {})

    def _try(self) -> None:
        """The canary: a few answers of every server, scored by the policy."""
        policy = copy.copy(self.policy)
        policy.ranks = ALONE  # no other rank scores with this one
        for address in self.addresses:
            alone = copy.copy(self)
            alone.addresses = [address]
            batch = proof.sample(policy, alone, TEMPERATURE)
            scored = policy.compute_logprobs_no_grad(batch).logprobs
            gap = float((scored - batch.require("logprobs_sampler"))[batch.actions].abs().mean())
            if not gap <= self.canary:
                raise LmgymError(
                    f"{address} samples with other weights than the policy's, or reports other log-probabilities: they "
                    f"differ by {gap:.2g} nats a token, where {self.canary:g} is allowed; start it so: {STARTED_SO}"
                )

    def _body(self, answers: Answers, number: int) -> Answer:
        """The request for an answer."""
        request, sampling = answers.requests[number], answers.sampling
        settings = {
            "max_tokens": answers.limits[number],
            "min_tokens": min(sampling.min_new_tokens, answers.limits[number]),
            "temperature": sampling.temperature,
            "logprobs": 0,  # of the sampled token alone
            "seed": request.key % 2**63,
            "ignore_eos": True,  # its stop ids are among these:
            "stop_token_ids": sorted(answers.stop_ids),
            "detokenize": bool(answers.stop_texts[number]),
        }
        if sampling.truncates:
            settings["top_k"] = sampling.top_k
            if answers.keeps_sets and sampling.top_k is not None:
                settings["logprobs"] = min(sampling.top_k + SPARE, self.policy.vocabulary)
        if texts := answers.stop_texts[number]:
            settings |= {"stop": list(texts), "include_stop_str_in_output": True}
        return {"token_ids": list(request.prompt_ids), "sampling_params": settings}

    def _take(self, answers: Answers, number: int, answer: Answer) -> None:
        """Add what a server has sampled to an answer, up to where lmgym's own rules end it."""
        truncates = answers.sampling.truncates and answers.keeps_sets
        try:
            choice = answer["choices"][0]
            ids, content = choice["token_ids"], choice["logprobs"]["content"]
            pairs = [(int(token), float(one["logprob"])) for token, one in zip(ids, content, strict=True)]
            kept = [self._kept(one["top_logprobs"], answers.sampling) for one in content] if truncates else []
            versions = {one["version"] for one in choice["weight_versions"]}
        except (KeyError, IndexError, TypeError, ValueError) as error:
            raise LmgymError(
                f"a vLLM server sent another answer than expected ({type(error).__name__}: {error})"
            ) from error
        if versions - {str(self._pushed)}:
            raise LmgymError(
                f"a vLLM server sampled with weights {', '.join(sorted(versions))}, and {self._pushed} were sent; "
                "does another run use it?"
            )
        for token, logprob in pairs:
            if answers.stops[number]:
                break
            if not math.isfinite(logprob) or logprob <= NEVER:
                raise LmgymError("a vLLM server reported a log-probability that is no number; has the policy diverged?")
            answers.add(number, token, logprob)
        if kept:
            taken = kept[: len(answers.ids[number])]
            answers.add_sets([number] * len(taken), _table(taken))
        answers.stops[number] = answers.stops[number] or "stop"  # a stop string that only its own decoding shows

    def _kept(self, likeliest: Sequence[Answer], sampling: Sampling) -> list[int]:
        """The ids of the tokens that a token was drawn from, of the likeliest ones and their log-probabilities. Raises
        LmgymError if none of these was cut off, since there may then be more."""
        kept = sorted(int(one["token_id"]) for one in likeliest if float(one["logprob"]) > NEVER)
        if len(kept) == len(likeliest) < self.policy.vocabulary:
            raise LmgymError(
                f"sampling.top_k is {sampling.top_k}, and a vLLM server drew a token from {len(kept)} or more: so many "
                "are equally likely; write engine.name: sampler, or leave top_k out"
            )
        return kept

    def _ask(self, address: str, path: str, body: Mapping[str, Any] | None = None) -> Answer:
        """The JSON that a server answers, within the time limit."""
        data = None if body is None else json.dumps(body).encode()
        request = urllib.request.Request(address + path, data, {"Content-Type": "application/json"})
        opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
        try:
            with opener.open(request, timeout=self.seconds) as response:
                return json.loads(response.read() or b"{}")  # type: ignore[no-any-return]
        except urllib.error.HTTPError as error:
            with error:
                said = " ".join(error.read().decode(errors="replace").split())[:300]
            hint = f"; start it so: {STARTED_SO}" if error.code == 404 else ""
            if error.code == 500:
                hint = "; its log says why (on a processor it needs --no-enable-chunked-prefill); start it again"
            if error.code == 400 and body and (wanted := body.get("sampling_params", {}).get("logprobs")):
                hint = f"; sampling.top_k needs a server that was started with --max-logprobs {wanted} or more"
            raise LmgymError(f"engine.address: {address}{path} answered {error.code} ({said}){hint}") from error
        except (OSError, ValueError) as error:  # also a time limit, and a connection that ends
            raise LmgymError(
                f"engine.address: no vLLM answers at {address} ({type(error).__name__}: {error}); start it again, then "
                "resume the run"
            ) from error


def check_sampling(sampling: Sampling) -> None:
    """Raise LmgymError for what vLLM servers cannot do so that training knows what tokens were drawn from."""
    if sampling.more_than_top_k or (isinstance(sampling, Decoding) and sampling.generation):
        raise LmgymError(
            "engine.name: with vllm, sampling.top_p, min_p and evaluation.generation are left out: the sets that "
            "tokens are drawn from do not come back; write top_k instead, or engine.name: sampler"
        )


def _table(sets: Sequence[Sequence[int]]) -> Candidates:
    """Sets of ids as a table; the first id fills up the rows."""
    width = max(map(len, sets), default=1)
    ids = torch.tensor([[*one, *[one[0]] * (width - len(one))] for one in sets]).view(-1, width)
    sizes = torch.tensor([len(one) for one in sets])
    return Candidates(ids, torch.arange(width) < sizes[:, None])


def write_weights(policy: Policy, folder: Path) -> None:
    """Write the policy's weights as vLLM loads them, adapters merged. A tied head is written too: a server that has it
    already would keep its old one."""
    model = lora.merged(policy.model) if lora.has_adapter(policy.model) else policy.model
    hidden = folder.with_name(folder.name + ".new")
    shutil.rmtree(hidden, ignore_errors=True)
    hidden.mkdir(parents=True)
    tensors = {name: tensor.detach().cpu().contiguous().clone() for name, tensor in model.state_dict().items()}
    save_file(tensors, hidden / "model.safetensors")
    model.config.save_pretrained(hidden)
    shutil.rmtree(folder, ignore_errors=True)
    hidden.rename(folder)
