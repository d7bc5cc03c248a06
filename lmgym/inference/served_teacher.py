"""A teacher behind an OpenAI-compatible completions endpoint: its most likely tokens at each action of a batch.

Each row of the batch is sent once, as token ids, to `/completions` with `prompt_logprobs: K`, as vLLM answers it: at
each place a table from token ids to log-probabilities and ranks, of the K most likely tokens and of the one there.
Only HTTP: vLLM is not imported."""

import json
import math
import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from lmgym.algorithms.requirements import ServedTeacher
from lmgym.batch import Batch, PolicyOutputs, TopLogprobs
from lmgym.core.endpoint import Endpoint, EndpointError, ask, check_address, give_up, in_threads, read_key, start_of
from lmgym.core.errors import LmgymError, represent
from lmgym.distributed.ranks import ALONE, Ranks
from lmgym.functional.divergences import with_rest

OWNER = "algorithm.teacher"
TRIED = "Ärger: 3+14=17, naïve 東京 🙂\n\tdef f(x): return x**2"  # tokenized by both sides, to compare them
BYTES = 512  # most of one token in a reply: its id, log-probability, rank and text
EXCESS = 1e-2  # by which the K probabilities may add up to more than 1: a served model computes in bf16
TOKEN_ID = re.compile(r"0|[1-9][0-9]{0,8}")  # one form for an id, so that none stands in a table twice
SHOWN = 8  # models in a message
Ids = tuple[int, ...]


@dataclass(frozen=True)
class Reached:
    """What a server says of itself: the model's name there, the tokens of prompt and answer that it reads (None: it
    does not say), and whether its tokenizer was compared with the policy's."""

    model: str
    context: int | None
    compared: bool


class EndpointTeacher:
    """The teacher of `served`, for a policy with this tokenizer and so many tokens in its vocabulary.

    Of several `ranks` each asks for its own share of the rows.

    Example:
        >>> teacher = EndpointTeacher(ServedTeacher("http://localhost:8000/v1", top_k=20), policy.vocabulary)
        >>> teacher.reach(policy.tokenizer)
        >>> teacher.top_logprobs(batch).ids  # [actions, 20]
    """

    def __init__(self, served: ServedTeacher, vocabulary: int, ranks: Ranks = ALONE) -> None:
        check_address(served.address, OWNER)
        key = read_key(served.key_variable, "algorithm.key_variable")
        address = served.address.rstrip("/")
        self.endpoint = Endpoint(OWNER, address, served.model or "", key, seconds=served.seconds)
        self.served, self.vocabulary, self.ranks = served, vocabulary, ranks
        self.context: int | None = None

    def reach(self, tokenizer: Any) -> Reached:
        """Ask the server for its models, if it can tokenize for the ids of a short text, and for the most likely tokens
        at the second of them. Raises LmgymError if it does not answer, does not have the model, has another tokenizer,
        or does not say so many tokens."""
        once = replace(self.endpoint, retries=0)
        try:
            models = _json(once, ask(once, "/models"))["data"]
            lengths = dict(_named(one) for one in models)
        except EndpointError as error:
            raise LmgymError(f"{error}; is the server there, and does its address end in /v1?") from None
        except (LookupError, TypeError, ValueError, AttributeError):
            give_up(once, "did not send a list of its models at /models, each with its id and max_model_len")
        name = self.endpoint.model or (next(iter(lengths)) if len(lengths) == 1 else "")
        if name not in lengths:
            asked = f"no model '{name}'" if name else "several models"
            raise LmgymError(
                f"{OWNER}: {once.base_url} has {asked}, and algorithm.teacher_model must name one that it has: "
                f"{', '.join(represent(once.redacted(name)) for name in sorted(lengths)[:SHOWN])}"
            )
        self.endpoint = replace(self.endpoint, model=name)
        longest = lengths[name]
        self.context = None if longest is None else longest - 1  # it samples one token behind the row
        ids = list(tokenizer(TRIED, add_special_tokens=False)["input_ids"])
        compared = self._compare_tokenizers(ids)
        self._ask_row(tuple(ids[:2]), retries=0)
        return Reached(name, self.context, compared)

    def top_logprobs(self, batch: Batch) -> TopLogprobs:
        """Its most likely tokens at each action of the batch, in the order of `batch.actions.nonzero()`. Equal rows are
        sent once. Raises LmgymError if the server fails, or sends something else."""
        if bool(batch.actions[:, 0].any()):
            raise LmgymError("an action has no token before it, so it cannot be scored; give each prompt at least one")
        # 1. The tokens of each row up to its last action, and the places of its actions.
        places = [actions.nonzero()[:, 0] for actions in batch.actions.cpu()]
        ends = [int(columns[-1]) + 1 if len(columns) else 0 for columns in places]
        rows = [tuple(tokens[:end].tolist()) for tokens, end in zip(batch.tokens.cpu(), ends, strict=True)]
        distinct = [row for row in dict.fromkeys(rows) if row]
        self._check_lengths(distinct)
        # 2. Each rank asks for some of the rows, a few at a time.
        asked = self.ranks.shares(distinct, [len(row) for row in distinct])[self.ranks.rank]
        replies = dict(zip(asked, in_threads(self._ask_row, asked, self.served.concurrency), strict=True))
        # 3. The actions, row by row; zeros where another rank knows.
        count, start = sum(map(len, places)), 0
        ids, logprobs = torch.zeros(count, self.served.top_k, dtype=torch.int32), torch.zeros(count, self.served.top_k)
        for row, columns in zip(rows, places, strict=True):
            part = slice(start, start := start + len(columns))
            if row in replies:  # which has no entry for the first token
                ids[part], logprobs[part] = replies[row][0][columns - 1].int(), replies[row][1][columns - 1]
        self.ranks.add(ids)
        self.ranks.add(logprobs)
        return TopLogprobs(ids, with_rest(logprobs))

    def compute_logprobs_no_grad(self, batch: Batch) -> PolicyOutputs:
        """Refused: a server is asked for its most likely tokens."""
        raise LmgymError(f"{OWNER} is an address, and only gkd learns from a teacher behind one")

    def _check_lengths(self, rows: Sequence[Ids]) -> None:
        longest = max(map(len, rows), default=0)
        if self.context is not None and longest > self.context:
            raise LmgymError(
                f"{OWNER}: prompt and answer have {longest} tokens, and {self.endpoint.base_url} reads {self.context}; "
                "start it with a larger --max-model-len, or lower sampling.max_new_tokens"
            )

    def _ask_row(self, row: Ids, retries: int | None = None) -> tuple[Tensor, Tensor]:
        """The most likely tokens [L-1 K] at all tokens of a row but the first, and their log-probabilities."""
        top_k = self.served.top_k
        endpoint = replace(self.endpoint, largest=2**20 + BYTES * (top_k + 1) * len(row))
        endpoint = endpoint if retries is None else replace(endpoint, retries=retries)
        body = {"model": endpoint.model, "prompt": list(row), "max_tokens": 1, "prompt_logprobs": top_k}
        try:
            reply = ask(endpoint, "/completions", {**body, "temperature": 0})
        except EndpointError as error:
            raise LmgymError(f"{error}; {self._remedy(error)}") from None
        try:
            tables = _json(endpoint, reply)["choices"][0]["prompt_logprobs"]
            likeliest = [_likeliest(table, token, top_k) for token, table in zip(row[1:], tables[1:], strict=True)]
        except (LookupError, TypeError, ValueError, AttributeError, OverflowError) as error:
            give_up(
                endpoint,
                f"did not send prompt_logprobs as vLLM does ({type(error).__name__}: {error}) but "
                f"{start_of(endpoint, reply)!r}",
            )
        ids, logprobs = (torch.tensor([pair[part] for pair in likeliest]) for part in (0, 1))
        self._check(ids, logprobs)
        return ids, logprobs

    def _check(self, ids: Tensor, logprobs: Tensor) -> None:
        """Raise LmgymError for ids that the policy does not have, and for numbers that are no log-probabilities."""
        if int(ids.max()) >= self.vocabulary:
            raise LmgymError(
                f"{OWNER}: {self.endpoint.base_url} finds the token id {int(ids.max())} likely, and the policy has the "
                f"ids 0 to {self.vocabulary - 1} only; the teacher must have the policy's tokenizer"
            )
        # Each other token is at most as likely as the least of these, so both bounds hold for any distribution.
        probabilities = logprobs.double().exp()
        sums = probabilities.sum(-1)
        others = (self.vocabulary - self.served.top_k) * probabilities[:, -1]
        wrong = ~((sums <= 1 + EXCESS) & (sums + others >= 1 - EXCESS))
        if bool(wrong.any()):
            raise LmgymError(
                f"{OWNER}: {self.endpoint.base_url} sends numbers that are no log-probabilities (the probabilities of "
                f"{self.served.top_k} tokens add up to {float(sums[wrong][0]):.4g}); start it with --logprobs-mode "
                "raw_logprobs"
            )

    def _remedy(self, error: EndpointError) -> str:
        """What helps, by what the server has answered."""
        if error.status is None or error.status >= 500:
            return "start it again, then resume the run"
        if error.status == 404:
            return "is there a /completions, and is algorithm.teacher_model still served?"
        return (
            f"algorithm.top_k needs a server that was started with --max-logprobs {self.served.top_k} or more, and "
            "every token id of the policy must be one of the teacher's"
        )

    def _compare_tokenizers(self, ours: list[int]) -> bool:
        """False if the server cannot be asked: /tokenize is not part of OpenAI's interface, and vLLM has it beside
        /v1. Raises LmgymError if it makes other ids of the text than `ours`."""
        root = replace(self.endpoint, base_url=self.endpoint.base_url.removesuffix("/v1"), retries=0)
        body = {"model": root.model, "prompt": TRIED, "add_special_tokens": False}
        try:
            reply = ask(root, "/tokenize", body)
            theirs = _json(root, reply)["tokens"]
        except (LmgymError, LookupError, TypeError):
            return False
        if not isinstance(theirs, list) or not all(type(id) is int for id in theirs):
            give_up(root, f"did not send token ids at /tokenize but {start_of(root, reply)!r}")
        if theirs != ours:
            raise LmgymError(
                f"{OWNER}: {self.endpoint.base_url} has another tokenizer than the policy ({TRIED!r} is {theirs[:8]} "
                f"... there and {ours[:8]} ... here), so it cannot score the policy's tokens"
            )
        return True


def _json(endpoint: Endpoint, reply: bytes) -> Any:
    try:
        return json.loads(reply)
    except (ValueError, RecursionError):
        give_up(endpoint, f"did not send JSON but {start_of(endpoint, reply)!r}")


def _named(model: Any) -> tuple[str, int | None]:
    """The id of a served model, and the tokens that it reads, if the server says so. Raises TypeError or ValueError."""
    name, longest = model["id"], model.get("max_model_len")
    if type(name) is not str or (longest is not None and type(longest) is not int):
        raise TypeError
    if longest is not None and longest < 2:
        raise ValueError
    return name, longest


def _likeliest(table: Any, token: int, top_k: int) -> tuple[list[int], list[float]]:
    """The ids and log-probabilities of the `top_k` most likely tokens of a place. Raises ValueError if its table has
    fewer, or not the `token` that is there, which vLLM always names, or if ranks and log-probabilities contradict each
    other; TypeError for what is no number.

    Example:
        >>> _likeliest({"5": {"logprob": -2.1, "rank": 9}, "7": {"logprob": -0.1, "rank": 1}}, token=5, top_k=1)
        ([7], [-0.1])
    """
    if str(token) not in table:
        raise ValueError(f"token {token} of the prompt has no log-probability")
    ranked = sorted(
        (_number(one["rank"], int), _id(name), _number(one["logprob"], int, float)) for name, one in table.items()
    )
    ranked = [one for one in ranked if one[0] <= top_k]
    if [rank for rank, _, _ in ranked] != list(range(1, top_k + 1)):
        raise ValueError(f"the ranks of the tokens are not 1 to {top_k}")
    ids, logprobs = [name for _, name, _ in ranked], [float(logprob) for *_, logprob in ranked]
    if any(math.isnan(logprob) for logprob in logprobs):
        raise ValueError("a log-probability is nan")
    if logprobs != sorted(logprobs, reverse=True):
        raise ValueError("a token of a higher rank is less likely than one of a lower")
    return ids, logprobs


def _id(name: str) -> int:
    """The token id that this key of a table is."""
    if not TOKEN_ID.fullmatch(name):
        raise ValueError("a key of a table is no token id")
    return int(name)


def _number(value: Any, *kinds: type) -> Any:
    """The value, if it is of one of these types and no bool."""
    if type(value) not in kinds:
        raise TypeError(f"a {type(value).__name__} in place of {' or '.join(kind.__name__ for kind in kinds)}")
    return value
