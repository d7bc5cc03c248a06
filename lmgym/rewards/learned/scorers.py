"""Loads the models that score texts: once per process, in evaluation mode, from a local folder or the Hub.

torch and transformers are imported inside the functions, so that a recipe's rewards can be looked up without them."""

import inspect
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import update_wrapper
from pathlib import Path
from typing import Any, Literal, TypeVar

from lmgym.core import seeds
from lmgym.core.errors import LmgymError
from lmgym.core.hub import prepare_hub
from lmgym.core.model_folder import COMPUTED, cannot_load, check_no_adapters
from lmgym.types import Example

Values = TypeVar("Values")
Kind = Literal["classifier", "token_classifier", "encoder", "causal"]
Device = Literal["auto", "cpu", "cuda", "mps"]
Compute = Literal["float32", "bfloat16"]
Truncation = Literal["refuse", "left", "right"]
CLASSES = {
    "classifier": "AutoModelForSequenceClassification",
    "token_classifier": "AutoModelForTokenClassification",
    "encoder": "AutoModel",
    "causal": "AutoModelForCausalLM",
}
NEEDED = {
    "classifier": f"a model with a trained classification head ({CLASSES['classifier']})",
    "token_classifier": f"a model with a trained head for each token ({CLASSES['token_classifier']})",
    "encoder": f"an encoder ({CLASSES['encoder']})",
    "causal": f"a causal language model ({CLASSES['causal']})",
}
UNBOUNDED = 10**6  # tokens; some tokenizers write 1e30 for an unknown limit
SHIFTED = ("roberta", "camembert", "longformer", "xmod", "data2vec-text")  # positions start at the padding id + 1


@dataclass(frozen=True, eq=False)
class Scorer:
    """A model that scores texts, with its tokenizer, which all rewards of the process that name it share; and how one
    reward reads texts with it.

    Example: Scorer("gpt2", "causal_perplexity", model, tokenizer, longest=1024)"""

    name: str
    reward: str
    model: Any
    tokenizer: Any
    longest: int | None  # most tokens that it can read, special ones included; None: no limit known
    truncation: Truncation = "refuse"
    tokens_per_forward: int = 16384  # padding included

    @property
    def labels(self) -> list[str]:
        """The names of a classifier's outputs, in their order."""
        return [str(self.model.config.id2label[index]) for index in range(self.model.config.num_labels)]

    @property
    def facts(self) -> dict[str, Any]:
        """What lmgym has written into the configuration of a reward model that it has trained; empty for others."""
        return dict(getattr(self.model.config, "lmgym", None) or {})


_loaded: dict[tuple[str | None, ...], Scorer] = {}


def loads_early(check: Callable[..., object]) -> Callable[[Callable[..., Values]], Callable[..., Values]]:
    """Decorator: before training starts (base.check_examples) `check` gets the examples, and the reward is called
    without texts. That loads its model and looks up its arguments, so that no error comes in a step."""

    def decorate(function: Callable[..., Values]) -> Callable[..., Values]:
        kinds = [parameter.kind for parameter in inspect.signature(function).parameters.values()]
        nothing: list[list[Any]] = [[] for kind in kinds if kind is inspect.Parameter.POSITIONAL_OR_KEYWORD]

        def early(examples: Sequence[Example], **arguments: Any) -> None:
            check(examples, **arguments)
            function(*nothing, **arguments)

        function.check = early  # type: ignore[attr-defined]
        return function

    return decorate


def by_model(
    kind: Kind,
    check: Callable[..., object] = lambda examples, **arguments: None,
    budget: int = 16384,
    cuts: bool = True,
) -> Callable[[Callable[..., Values]], Callable[..., Values]]:
    """Decorator: the last argument without a name is the model, a `Scorer` of this kind. The reward is called without
    it, and takes the arguments of every reward by a model in its place: `model`, `revision`, `device`, `compute`,
    `tokens_per_forward` (`budget`, if it is not given) and, if it `cuts` long texts, `truncation`. It is loaded early,
    with this `check`.

    Example:
        >>> @register("reward", "first_output")
        ... @by_model("classifier")
        ... def first_output(texts, examples, scorer):
        ...     return [row[0] for row in batched_forward.logits(scorer, text_rows(scorer, texts))]
        >>> first_output(texts, examples, model="models/sentiment", truncation="right")
    """

    def decorate(function: Callable[..., Values]) -> Callable[..., Values]:
        def reward(
            *texts: Any, model: str, truncation: Truncation = "refuse", revision: str | None = None,
            device: Device = "auto", compute: Compute = "float32", tokens_per_forward: int = budget, **arguments: Any,
        ) -> Values:  # fmt: skip
            name = function.__name__
            if truncation != "refuse" and not cuts:
                raise TypeError(f"{name}() takes no argument 'truncation'")
            shared = load_scorer(name, kind, model, revision, device, compute)
            scorer = replace(shared, reward=name, truncation=truncation, tokens_per_forward=tokens_per_forward)
            return function(*texts, scorer, **arguments)

        return loads_early(check)(filling_in(reward, function, () if cuts else ("truncation",)))

    return decorate


def filling_in(reward: Any, function: Callable[..., Values], without: Sequence[str] = ()) -> Callable[..., Values]:
    """The reward, which makes the last argument without a name of `function`, under that function's name. A recipe may
    give it the arguments of both, but those named in `without`."""
    named = inspect.Parameter.KEYWORD_ONLY
    first, *others = [p for p in inspect.signature(reward).parameters.values() if p.kind is named]
    own = list(inspect.signature(function).parameters.values())
    texts, keywords = [p for p in own if p.kind is not named], [p for p in own if p.kind is named]
    signature = inspect.Signature([*texts[:-1], first, *keywords, *(p for p in others if p.name not in without)])
    update_wrapper(reward, function)
    reward.__signature__ = signature
    reward.__annotations__ = {p.name: p.annotation for p in signature.parameters.values()}
    filled: Callable[..., Values] = reward
    return filled


def load_scorer(
    reward: str,
    kind: Kind,
    name: str,
    revision: str | None = None,
    device: Device = "auto",
    compute: Compute = "float32",
) -> Scorer:
    """The model of this name; loaded only once per process for the same kind, revision, device and precision.

    Raises LmgymError, with the reward's key, if the folder does not exist, the Hub refuses the model, the device is not
    available, or the checkpoint is of another kind or lacks weights that the reward needs."""
    unit, name = scorer_device(reward, device), os.path.expanduser(name)
    key = (kind, os.path.realpath(name) if Path(name).is_dir() else name, revision, unit, compute)
    if key not in _loaded:
        _loaded[key] = _load(reward, kind, name, revision, unit, compute)
    return _loaded[key]


def scorer_device(reward: str, device: Device) -> str:
    """The requested device; for "auto" the best available one. Raises LmgymError if it is not available."""
    import torch

    available = {"cuda": torch.cuda.is_available(), "mps": torch.backends.mps.is_available(), "cpu": True}
    if device == "auto":
        return next(name for name, here in available.items() if here)
    if not available[device]:
        raise LmgymError(f"key 'rewards.{reward}.device': there is no {device} device here; write auto or cpu")
    return device


def _load(reward: str, kind: Kind, name: str, revision: str | None, device: str, compute: Compute) -> Scorer:
    import torch
    import transformers

    key = f"key 'rewards.{reward}.model'"
    # Read the configuration first: it shows a missing model or a wrong kind without loading weights.
    if Path(name, "recipe.yaml").is_file():  # a run of lmgym
        if not Path(name, "final").is_dir():
            raise LmgymError(f"{key}: the run {name} has written no model yet (there is no final/)")
        name = str(Path(name, "final"))
    looks_local = name.startswith((".", "/", "~", os.sep)) or name.count("/") > 1
    if looks_local and not Path(name).is_dir():
        raise LmgymError(f"{key}: there is no model folder {name}")
    prepare_hub(name)
    check_no_adapters(key, name)
    try:
        config = transformers.AutoConfig.from_pretrained(name, revision=revision, trust_remote_code=False)
    except Exception as error:  # the errors of transformers and the Hub client have no common base class
        raise cannot_load(key, name, error) from error
    if kind == "causal":
        _check_causal(key, reward, name, config)
    settings = {"revision": revision, "trust_remote_code": False}
    try:
        # Missing weights get random values; fork_rng keeps these draws out of the run's own random numbers.
        with _quietly(), seeds.GLOBAL, torch.random.fork_rng(devices=[]):
            model, info = getattr(transformers, CLASSES[kind]).from_pretrained(
                name, dtype=getattr(torch, compute), output_loading_info=True, ignore_mismatched_sizes=True, **settings
            )
    except Exception as error:
        if "Unrecognized configuration class" in str(error):
            raise LmgymError(f"{key}: {name} is a {config.model_type}, and '{reward}' needs {NEEDED[kind]}") from error
        raise cannot_load(key, name, error) from error
    _check_weights(key, reward, kind, name, info, model.base_model_prefix)
    try:
        tokenizer = transformers.AutoTokenizer.from_pretrained(name, **settings)
    except Exception as error:
        raise cannot_load(key, name, error, tokenizer=True) from error
    if kind == "encoder" and getattr(config, "is_encoder_decoder", False):
        model = model.get_encoder()
    model = model.to(device).eval().requires_grad_(False)
    return Scorer(name, reward, model, tokenizer, _longest(config, tokenizer))


def _check_weights(key: str, reward: str, kind: Kind, name: str, info: Mapping[str, Any], trunk: str) -> None:
    """Raise LmgymError for a checkpoint without a trained head, or whose tensors are not those that its configuration
    describes. A pooler is often left over or missing, and so is what an encoder's checkpoint has beside its trunk."""
    missing = sorted(one for one in info["missing_keys"] if kind != "encoder" or "pooler" not in one)
    if missing:
        raise LmgymError(f"{key}: {name} lacks {', '.join(missing[:3])}, and '{reward}' needs {NEEDED[kind]}")
    reshaped = sorted(one[0] for one in info["mismatched_keys"])
    beyond = sorted(one for one in info["unexpected_keys"] if one.startswith(f"{trunk}.") and "pooler" not in one)
    beyond = [one for one in beyond if not COMPUTED.search(one)]
    for names, what in ((reshaped, "in another shape than"), (beyond, "that are not in")):
        if names:
            raise LmgymError(
                f"{key}: {name} holds {len(names):,} tensors {what} the model that its "
                f"config.json describes ({', '.join(names[:3])}); take the right configuration"
            )


def _check_causal(key: str, reward: str, name: str, config: Any) -> None:
    """Raise LmgymError if the model is not causal. transformers loads a masked LM as a causal one without any warning,
    and its numbers would mean nothing."""
    names = getattr(config, "architectures", None) or []
    causal = any(one.endswith(("ForCausalLM", "LMHeadModel", "ForConditionalGeneration")) for one in names)
    if getattr(config, "is_encoder_decoder", False) or (names and not causal):
        kind = names[0] if names else config.model_type
        raise LmgymError(f"{key}: {name} is a {kind}, and '{reward}' needs {NEEDED['causal']}")


def _longest(config: Any, tokenizer: Any) -> int | None:
    """The most tokens that the model can read, by its positions and its tokenizer's limit; None if neither is known."""
    text = config.get_text_config()
    positions = getattr(text, "max_position_embeddings", None) or getattr(text, "n_positions", None)
    if positions and any(family in text.model_type for family in SHIFTED):
        positions -= text.pad_token_id + 1
    known = [int(number) for number in (positions, tokenizer.model_max_length) if number and 0 < number < UNBOUNDED]
    return min(known, default=None)


@contextmanager
def _quietly() -> Iterator[None]:
    """Silence transformers' progress bars and its report of missing weights; lmgym has its own error for these."""
    from transformers.utils import logging

    logging.disable_progress_bar()
    before = logging.get_verbosity()
    logging.set_verbosity_error()
    try:
        yield
    finally:
        logging.set_verbosity(before)
