"""What the layers of a causal model ask of attention, read from one short forward pass of the model.

transformers builds a mask for the attention function that a model is set to, and hands it to every layer. Here both
functions are lmgym's own: the mask says by which rule it was made, and the attention function notes the rule of its
layer. So a window is known without rows that are longer than it, and nothing depends on how a family names it."""

import traceback
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedModel

from lmgym.core.errors import LmgymError
from lmgym.models import hooks
from lmgym.models.attention.packed import per_query_head
from lmgym.models.attention.rules import Rule
from lmgym.models.families import first_position, trunk_of

NAME = "lmgym-probe"
# What a layer may hand to attention beside queries, keys, values, mask and scale. The mask holds the window already;
# what was meant for the trunk passes through. Anything else (a bias, a selection of keys) is not known here.
KNOWN = {"dropout", "sliding_window", "softcap", "s_aux", "is_causal", "position_ids", "use_cache", "lmgym_rules_found"}

LMGYM, TORCH = Path(__file__).parents[1], Path(torch.__file__).parent
MODULE = TORCH / "nn" / "modules" / "module.py"
MISTAKES = (NameError, AttributeError, ImportError, KeyError, TypeError)  # if a line of lmgym raises them


def attention_rules(model: PreTrainedModel) -> tuple[Rule, ...]:
    """The rule of each layer of a causal model: a function of its class and configuration. Raises LmgymError, with a
    reason that ends a sentence, if a layer computes something that lmgym's layouts cannot."""
    found: dict[int, list[Rule]] = {}
    ids = torch.tensor([[0, 1, 0]], device=model.device)
    try:
        with torch.no_grad(), hooks.attention_through(model, NAME):
            places = torch.arange(ids.shape[1], device=ids.device)[None] + (first_position(model) or 0)
            trunk_of(model)(input_ids=ids, position_ids=places, use_cache=False, lmgym_rules_found=found)
    except Exception as error:  # of any kind: the code of a family that was not written for this
        if isinstance(error, LmgymError) or is_own_mistake(error):
            raise
        raise LmgymError(f"its layers could not be read ({one_line(error)})") from error
    config: Any = model.config.get_text_config(decoder=True)
    layers = int(getattr(config, "num_hidden_layers", 0) or 0)
    if apart := [layer for layer in range(layers) if layer not in found]:
        raise LmgymError(
            f"{len(apart)} of its {layers} layers have no attention through transformers' attention interface"
        )
    if twice := [layer for layer, rules in found.items() if len(rules) > 1 or layer >= layers]:
        raise LmgymError(f"its layer {twice[0]} attends more than once")
    return tuple(found[layer][0] for layer in range(layers))


def is_own_mistake(error: Exception) -> bool:
    """True if an exception of a trial is lmgym's mistake, which must be seen, and not the model's.

    It is the model's if the model ran: then its traceback has a frame of torch's Module, or one that is neither torch's
    nor lmgym's. But a wrong name, attribute, key or call in a line of lmgym is lmgym's mistake wherever it ran, for
    instance in the attention function that the model calls. An LmgymError is a reason, not a mistake."""
    files = [Path(frame.filename) for frame in traceback.extract_tb(error.__traceback__)]
    if isinstance(error, LmgymError) or not files:
        return False
    if LMGYM in files[-1].parents and isinstance(error, MISTAKES):
        return True
    return all(file != MODULE and (LMGYM in file.parents or TORCH in file.parents) for file in files)


def one_line(error: Exception) -> str:
    """What an exception says, short enough for a sentence."""
    return " ".join(f"{type(error).__name__}: {error}".split())[:160]


def _note(
    module: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Any,
    scaling: float | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """The attention function of the probe."""
    if "lmgym_rules_found" not in kwargs:
        raise LmgymError("its layers do not hand keyword arguments on to attention")
    asked = [name for name, given in kwargs.items() if name not in KNOWN and given is not None and given is not False]
    if asked:
        raise LmgymError(f"its layer {module.layer_idx} hands `{asked[0]}` to attention, which lmgym does not know")
    rule = getattr(attention_mask, "lmgym_rule", None)
    if rule is None or kwargs.get("is_causal") is False:
        raise LmgymError(f"the mask of its layer {module.layer_idx} is not one of all tokens before, or of a window")
    softcap, sinks = kwargs.get("softcap"), kwargs.get("s_aux") is not None
    rule = Rule(rule.window, rule.chunked, None if softcap is None else float(softcap), sinks)
    kwargs["lmgym_rules_found"].setdefault(module.layer_idx, []).append(rule)
    keys, values = per_query_head(query, key, value)
    out = F.scaled_dot_product_attention(query, keys, values, is_causal=True, scale=scaling)
    return out.transpose(1, 2), None


def _mask(
    q_length: int, mask_function: Any, local_size: int | None = None, device: Any = "cpu", **kwargs: Any
) -> Tensor:
    """The mask function of the probe: a causal mask that carries the rule it was asked for, if it is a known one."""
    mask = torch.ones(1, 1, q_length, q_length, dtype=torch.bool, device=device).tril()
    candidates = [Rule()] if local_size is None else [Rule(local_size), Rule(local_size, chunked=True)]
    agreed = (rule for rule in candidates if _agrees(rule, mask_function, mask.device))
    mask.lmgym_rule = next(agreed, None)  # type: ignore[attr-defined]
    return mask


def _agrees(rule: Rule, mask_function: Any, device: torch.device) -> bool:
    """True if transformers' mask function says the same as the rule: at the first tokens, and around the multiples of
    the window (of 4,096 tokens without one). `device` is the model's; chunks' mask function has a tensor there."""
    edge, zero = rule.window or 4096, torch.tensor(0, device=device)
    around = {max(place + turn, 0) for place in (0, edge, 2 * edge) for turn in (-2, -1, 0, 1, 2)}
    places = torch.tensor(sorted(around), device=device)
    query, key = torch.meshgrid(places, places, indexing="ij")
    try:
        said = mask_function(zero, zero, query, key)
    except IndexError:  # it looks something up for each token
        return False
    return torch.equal(torch.as_tensor(said).broadcast_to(query.shape), rule.sees(query, key))


AttentionInterface.register(NAME, _note)
AttentionMaskInterface.register(NAME, _mask)
