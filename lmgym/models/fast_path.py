"""Which models take the fast path: those whose layers can be read, and who pass a trial against their own forward pass.

Families of the list in families.py are compared with Hugging Face by the tests. Every other causal model is tried when
it is loaded: (1) each layer says what it asks of attention (attention_probe.py); (2) a few rows of two turns are scored
in packed rows and decoded with lmgym's cache, and must agree with the model's own pass, each row alone, as far as
rounding explains. If not, the model takes the plain path, and the reason is one sentence."""

from collections.abc import Sequence

import torch
from jaxtyping import Float, Int
from torch import Tensor

from lmgym.batch import Batch, collate
from lmgym.core import seeds
from lmgym.core.errors import LmgymError
from lmgym.models import copies
from lmgym.models.attention.cached_rows import CachedRows, ExtendedRows, PrefilledRows
from lmgym.models.attention.kv_cache import KeyValueCache, SharedPrompts
from lmgym.models.attention_probe import attention_rules, is_own_mistake, one_line
from lmgym.models.bound import bound_of, gap_of
from lmgym.models.distributions import own_logprobs, without
from lmgym.models.families import supports_fast_path, trunk_of
from lmgym.models.language_model import Route
from lmgym.models.policy import Policy
from lmgym.types import Episode, Example, Turn

PROMPTS, ANSWERS = (9, 4), 2  # tokens of the trial's prompts, and answers to each
FIRST, NEXT, SECOND = 5, 4, 3  # tokens of the first answer, of the next prompt, and of the second answer
LONGEST_WINDOW = 256  # rows are made longer than a window up to this; longer ones are known from the probe


def route_of(policy: Policy, tries: bool = True) -> Route:
    """The forward passes for a policy's model; without `tries`, as when only listed families took the fast path.

    A pure function of the model: no random number moves, and its weights, modes and settings stay. An exception of the
    model's code means the plain path; one of lmgym's own code (`is_own_mistake`) is raised.
    Example: route_of(policy).plain_because
    -> "1 of its 2 layers have no attention through transformers' attention interface"
    """
    if supports_fast_path(policy.model.config):
        return Route(fast=True)
    if policy.encoder_decoder:
        return Route(fast=False, plain_because="lmgym does not know what its LM head reads")
    if not tries:
        return Route(False, plain_because="the run began when lmgym did not try other families than those it lists")
    try:
        rules = attention_rules(policy.model)
        rules = rules if any(not rule.is_plain(2**62) for rule in rules) else ()
        fast = policy.but(fast=True, rules=rules, own_head=None)
        fast = fast.but(own_head=_head_output(fast))
        precise, batch = fast.but(compute=next(policy.model.parameters()).dtype), trial_batch(fast)
        own, spread = own_logprobs(precise, batch)
        _try(precise, batch, own, spread)  # where a mistake cannot hide behind rounding
        if fast.compute != precise.compute:
            _try(copies.sampling(fast), batch, own, spread)  # as answers are sampled
    except Exception as error:  # of any kind: the code of a family that was not written for this
        if is_own_mistake(error):
            raise
        known = isinstance(error, LmgymError)
        return Route(fast=False, plain_because=str(error) if known else f"the fast path fails ({one_line(error)})")
    return Route(True, rules, fast.own_head)


@torch.no_grad()
def _head_output(policy: Policy) -> "type | None":
    """None if the logits are the LM head's outputs for the trunk's hidden states. Else (scaled or capped logits, scaled
    states) the class of the trunk's output, so that the model's own code can turn hidden states into logits."""
    states: list[object] = []
    handle = trunk_of(policy.model).register_forward_hook(lambda *called: states.append(called[2]))
    try:
        logits = policy.model(input_ids=torch.tensor([[0, 1, 0]], device=policy.device), use_cache=False).logits[0]
    finally:
        handle.remove()
    hidden = getattr(states[0], "last_hidden_state", None) if states else None
    if hidden is None or hidden.shape[-1] != policy.hidden_size:
        raise LmgymError("its LM head does not read the hidden states of its base model")
    plain = policy.head(hidden[0])
    return None if torch.equal(plain, logits.to(plain.dtype)) else type(states[0])


@torch.no_grad()
def _try(policy: Policy, batch: Batch, own: Float[Tensor, "N T"], spread: float) -> None:
    """Raise LmgymError if the fast path differs from the model's `own` pass by more than rounding explains."""
    where, bound = str(policy.compute).removeprefix("torch."), bound_of(policy, spread)
    for name, way in WAYS.items():
        with policy.precision():
            logprobs = way(policy, batch)
        gap = gap_of(logprobs, own, batch.actions & (logprobs != 0))
        if not gap.within(bound):
            raise LmgymError(f"{name} on the fast path differ from its own pass by {gap}; {where} explains {bound}")


def trial_batch(policy: Policy) -> Batch:
    """Rows of two turns with random ordinary ids: two answers to each prompt, longer than short windows."""
    windows = [rule.window for rule in policy.rules if rule.window is not None and rule.window <= LONGEST_WINDOW]
    rest = FIRST + NEXT + SECOND
    room = (policy.context or 2**62) - rest
    prompts = [max(1, min(length + max(windows, default=0), room - index)) for index, length in enumerate(PROMPTS)]
    special = {*policy.special_ids, policy.pad_id, *policy.never}
    ordinary = [token for token in range(policy.vocabulary) if token not in special] or [0]

    def ids(count: int, *name: int | str) -> list[int]:
        drawn = seeds.uniforms([seeds.key("path", *name)], 0, count)[0] * len(ordinary)
        return [ordinary[int(place)] for place in drawn]

    episodes: list[Episode] = []
    for group, length in enumerate(prompts):
        for answer in range(ANSWERS):
            turns = [
                Turn(ids(length, "prompt", group), ids(FIRST, "answer", group, answer)),
                Turn(ids(NEXT, "next", group, answer), ids(SECOND, "second", group, answer)),
            ]
            episodes.append(Episode(Example(f"path/{group}", ""), group, len(episodes), turns))
    return collate(episodes, policy.pad_id)


def _packed(policy: Policy, batch: Batch) -> Float[Tensor, "N T"]:
    return policy.compute_logprobs_no_grad(batch).logprobs


@torch.no_grad()
def _decoded_first(policy: Policy, batch: Batch) -> Float[Tensor, "N T"]:
    """Log-probabilities of the first answers, decoded with lmgym's cache behind prompts that are shared where the
    decoder shares them. Zero elsewhere."""
    device, rows = policy.device, len(batch)
    tokens, slots = batch.tokens.to(device), torch.arange(rows, device=device)
    prompts = [length - FIRST - NEXT - SECOND for length in batch.mask.sum(1).tolist()]
    ids = [tuple(tokens[row, : prompts[row]].tolist()) for row in range(0, rows, ANSWERS)]
    cache, source = KeyValueCache(rows, max(prompts) + FIRST), slots // ANSWERS
    layout = PrefilledRows(list(map(len, ids)), cache, source, slots)
    if device.type == "cpu":
        cache.prompts = SharedPrompts(len(ids), rows, max(prompts), device)
        answers = [range(ANSWERS * place, ANSWERS * (place + 1)) for place in range(len(ids))]
        assigned = cache.prompts.assign(list(zip(ids, answers, strict=True)), ())
        layout = PrefilledRows(list(map(len, ids)), cache.prompts.cache, *assigned)
    together = torch.tensor([[token for prompt in ids for token in prompt]], device=device)
    hidden = policy.forward_hidden(together, layout.positions[None], layout)[0]
    ends = torch.tensor(list(map(len, ids)), device=device).cumsum(0) - 1
    in_slot = [0 if cache.prompts is not None else length for length in prompts]
    return _steps(policy, tokens, cache, hidden[ends][source], prompts, in_slot, FIRST)


@torch.no_grad()
def _decoded_second(policy: Policy, batch: Batch) -> Float[Tensor, "N T"]:
    """The same of the second answers: their prompts are computed behind the cached first turns."""
    device, rows = policy.device, len(batch)
    tokens, slots = batch.tokens.to(device), torch.arange(rows, device=device)
    total = batch.mask.sum(1).tolist()
    cached = [length - NEXT - SECOND - 1 for length in total]  # the last token of an answer has not been read

    def packed(begins: Sequence[int], ends: Sequence[int]) -> Tensor:
        return torch.cat([tokens[row, begins[row] : ends[row]] for row in range(rows)])[None]

    cache, starts = KeyValueCache(rows, max(total)), [length - SECOND for length in total]
    first = PrefilledRows(cached, cache, slots, slots)
    policy.forward_hidden(packed([0] * rows, cached), first.positions[None], first)
    layout = ExtendedRows(cache, torch.tensor(cached, device=device), [NEXT + 1] * rows, slots)
    hidden = policy.forward_hidden(packed(cached, starts), layout.positions[None], layout)[0]
    return _steps(policy, tokens, cache, hidden[NEXT :: NEXT + 1], starts, starts, SECOND)


def _steps(
    policy: Policy,
    tokens: Int[Tensor, "N T"],
    cache: KeyValueCache,
    hidden: Float[Tensor, "N H"],
    starts: Sequence[int],
    in_slot: Sequence[int],
    count: int,
) -> Float[Tensor, "N T"]:
    """Log-probabilities of `count` tokens of each row from column `starts` on, one step of the decoder for each; the
    first ones follow from `hidden`. `in_slot` are the tokens in each slot of the cache. Zero elsewhere."""
    slots, column = torch.arange(len(tokens), device=tokens.device), torch.tensor(starts, device=tokens.device)
    lengths, result = torch.tensor(in_slot, device=tokens.device), torch.zeros(tokens.shape)
    for step in range(count):
        if step:
            layout = CachedRows(cache, lengths + step - 1, max(in_slot) + step)
            last = tokens[slots, column + step - 1][:, None]
            hidden = policy.forward_hidden(last, layout.positions[:, None], layout)[:, 0]
        ids = tokens[slots, column + step]
        logprobs = without(policy.head(hidden), policy.never).log_softmax(-1).gather(1, ids[:, None])[:, 0]
        result[slots.cpu(), (column + step).cpu()] = logprobs.float().cpu()
    return result


WAYS = {"packed rows": _packed, "first turns": _decoded_first, "second turns": _decoded_second}
DECODED = (_decoded_first, _decoded_second)
