"""The training side of LlamaGym's Agent: the model with its value head, the sampler, PPO."""

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import nn

from lmgym.batch import collate
from lmgym.compat.llamagym_settings import sampling_of, settings_of
from lmgym.core import seeds
from lmgym.core.errors import LmgymError, warn
from lmgym.inference.sampler import Sampler
from lmgym.logs.records import episode_metrics
from lmgym.models import copies, lora, quantization
from lmgym.models.critic import value_head, with_critic
from lmgym.models.load import load_policy
from lmgym.models.policy import VALUE_HEAD, Policy, save_value_head
from lmgym.models.policy_section import PolicySection
from lmgym.types import Episode
from lmgym.updates.optimizer import make_optimizer
from lmgym.updates.prepare import batch_metrics, prepare
from lmgym.updates.update import update

COMPUTE = {"auto": "auto", "torch.float32": "float32", "float32": "float32"} | dict.fromkeys(
    ("torch.bfloat16", "bfloat16"), "bfloat16"
)


class AutoModelForCausalLMWithValueHead(nn.Module):
    """A causal model of Hugging Face's (`pretrained_model`) and a value head (`v_head`, zero at first).

    Take `from_pretrained`. `to`, `parameters`, `generate` and `save_pretrained` are as one expects.

    Example:
        >>> AutoModelForCausalLMWithValueHead.from_pretrained("meta-llama/Llama-2-7b-chat-hf", peft_config=LoraConfig())
    """

    def __init__(self, pretrained_model: Any, compute: torch.dtype | None = None) -> None:
        super().__init__()
        self.pretrained_model, self.compute = pretrained_model, compute
        trained = next((p for p in pretrained_model.parameters() if p.requires_grad), None)
        like = next(pretrained_model.parameters()) if trained is None else trained
        size = int(pretrained_model.get_output_embeddings().weight.shape[1])
        self.v_head = value_head(size, like.float())

    @classmethod
    def from_pretrained(
        cls,
        pretrained_model_name_or_path: Any,
        *,
        peft_config: Any = None,
        load_in_8bit: bool = False,
        load_in_4bit: bool = False,
        revision: str | None = None,
        token: Any = None,
        dtype: Any = "auto",
        torch_dtype: Any = None,
        device_map: Any = None,
        tokenizer: str | None = None,
        seed: int = 0,
        **others: Any,
    ) -> "AutoModelForCausalLMWithValueHead":
        """Load a folder, a Hub id or `builtin:tiny`, or wrap a loaded model.

        Parameters are fp32; `dtype` is the precision of forward passes. With `peft_config` (peft's LoraConfig) only
        adapters train, and `load_in_8bit` and `load_in_4bit` quantise the base model. A value head in the folder is
        loaded. `tokenizer` names the tokenizer if the folder has none; the adapters' initial weights are a function of
        `seed`. Raises LmgymError for options that lmgym cannot honour."""
        if others:
            raise LmgymError(f"from_pretrained: lmgym cannot honour {', '.join(sorted(others))}; remove it")
        adapters = None if peft_config is None else _lora(peft_config)
        if not isinstance(pretrained_model_name_or_path, str | Path):
            model = _plain_model(pretrained_model_name_or_path)
            if load_in_8bit or load_in_4bit:
                raise LmgymError("from_pretrained: this model is loaded already; name its folder to have it packed")
            if adapters is not None:
                lora.add_lora(model, **adapters, seed=seeds.key(seed, "lora"))
            return cls(model)
        if (load_in_8bit or load_in_4bit) and adapters is None:
            raise LmgymError("from_pretrained: packed weights cannot train; add peft_config, so that adapters do")
        if isinstance(token, str) and token != os.environ.get("HF_TOKEN"):
            raise LmgymError("from_pretrained: put the token of the Hub into the environment variable HF_TOKEN instead")
        if device_map not in (None, "auto"):
            raise LmgymError("from_pretrained: device_map is not taken over; write device_map='auto', or .to(device)")
        compute: Any = COMPUTE.get(str(dtype if torch_dtype is None else torch_dtype))
        if compute is None:
            raise LmgymError("from_pretrained: dtype is float32, bfloat16 (of forward passes) or auto")
        fields = {} if adapters is None else {f"lora_{name}": value for name, value in adapters.items()}
        packed: Any = "4bit" if load_in_4bit else "8bit" if load_in_8bit else None
        name = str(pretrained_model_name_or_path)
        section = PolicySection(
            model=name, revision=revision, tokenizer=tokenizer, compute=compute, quantise=packed, **fields
        )
        policy = load_policy(section, seed)
        made = cls(policy.model, policy.compute)
        if (Path(name) / VALUE_HEAD).is_file():
            weight = load_file(Path(name) / VALUE_HEAD)["weight"]
            made.v_head.weight.data = weight.clone().to(made.v_head.weight.device)
        return made

    @property
    def config(self) -> Any:
        return self.pretrained_model.config

    def to(self, device: Any) -> "AutoModelForCausalLMWithValueHead":  # type: ignore[override]
        """Move the model. A quantised one cannot be moved: LmgymError for another device."""
        return super().to(device) if _moves(self.pretrained_model, device) else self

    def generate(self, *arguments: Any, **keywords: Any) -> Any:
        """Hugging Face's `generate` of the language model."""
        return self.pretrained_model.generate(*arguments, **keywords)

    def save_pretrained(self, folder: str | Path) -> None:
        """Write the language model (adapters merged), which `AutoModelForCausalLM.from_pretrained` reads, and the value
        head. Of a quantised base only the adapters are written."""
        folder, model = Path(folder), self.pretrained_model
        merges = lora.has_adapter(model) and not quantization.is_quantised(model)
        lora.save(lora.merged(model) if merges else model, folder)
        save_value_head(self.v_head, folder)


class Learner:
    """The policy of an Agent, its sampler and its optimizer. `version` counts the batches trained on."""

    def __init__(
        self, model: Any, tokenizer: Any, device: Any, generate: Mapping[str, Any], ppo: Mapping[str, Any]
    ) -> None:
        self.settings = settings_of(ppo)
        self.policy = policy_of(model, tokenizer, device)
        self.sampling = sampling_of(generate, tokenizer, self.policy.stop_ids)
        self.sampling.check_vocabulary(self.policy.vocabulary)
        self.algorithm, self.seed, self.version = self.settings.ppo, self.settings.seed, 0
        if not self.policy.parameters():
            raise LmgymError("no parameter of the model trains (requires_grad); give it adapters, or unfreeze it")
        self.optimizer = make_optimizer(self.algorithm, self.policy, self.settings.optimizer)
        self.engine = Sampler(self.policy, rows=1)
        self.copies: dict[str, Any] = {}
        if self.algorithm.requirements.reference:
            adapted = lora.has_adapter(self.policy.model)
            reference = lora.AdapterDisabledPolicy(self.policy) if adapted else copies.frozen(self.policy)
            self.copies["reference"] = reference

    def train(self, episodes: Sequence[Episode], samples: Sequence[Episode]) -> dict[str, float]:
        """PPO on one batch; returns its metrics. `samples` are the episodes as they train."""
        for index, sample in enumerate(samples):
            sample.index = sample.group = index
        self.algorithm.version = self.version
        batch = collate(
            samples,
            self.policy.pad_id,
            self.sampling.temperature,
            sorted({*self.policy.stop_ids, *self.sampling.stop_ids}),
            seeds.key(self.seed, "llamagym", "update", self.version),
            self.sampling.max_new_tokens,
        )
        batch = prepare(batch, self.policy, self.copies, self.algorithm)
        rate = self.optimizer.set_step(self.version, self.version + 1)
        metrics = update(self.algorithm, self.policy, batch, self.optimizer)
        answers = sum(len(episode.turns) for episode in episodes)
        older = sum(len(episode.turns) for episode in episodes if episode.version < self.version)
        self.version += 1
        self.policy.had_updates(self.version)
        self.engine.load(self.policy, self.version)
        for index, episode in enumerate(episodes):
            episode.group = index
        counts = {"episodes": float(len(episodes)), "answers": float(answers), "answers/older": older / answers}
        return {**episode_metrics(episodes), **batch_metrics(batch), **metrics, **counts, "learning_rate": rate}

    def save(self, folder: Path) -> None:
        self.policy.save_pretrained(folder)
        assert self.policy.value_head is not None
        save_value_head(self.policy.value_head, folder)


def policy_of(model: Any, tokenizer: Any, device: Any = None) -> Policy:
    """A Policy with a value head around the user's model, which is moved to `device` and trains in place."""
    wrapped = isinstance(model, AutoModelForCausalLMWithValueHead)
    own = model.pretrained_model if wrapped else _plain_model(model)
    if tokenizer.eos_token_id is None:
        raise LmgymError("the tokenizer has no end-of-sequence token, so no answer could end; set tokenizer.eos_token")
    rows = int(own.get_input_embeddings().weight.shape[0])
    if len(tokenizer) > rows:
        raise LmgymError(
            f"the tokenizer has {len(tokenizer)} tokens and the model {rows}; write "
            f"model.{'pretrained_model.' if wrapped else ''}resize_token_embeddings(len(tokenizer))"
        )
    if device is not None and _moves(own, device):
        model.to(device)
    compute = (model.compute if wrapped else None) or next(own.parameters()).dtype
    low = [p for p in own.parameters() if p.requires_grad and p.dtype in (torch.bfloat16, torch.float16)]
    if low:
        warn(
            f"the model's parameters are {low[0].dtype}, too coarse for a small step of the optimizer; those that "
            "train are fp32 from now on",
            stacklevel=5,
        )
        for parameter in low:
            parameter.data = parameter.data.float()
    policy = Policy(own, tokenizer, torch.bfloat16 if compute == torch.float16 else compute)
    return policy.but(value_head=model.v_head) if wrapped else with_critic(policy, separate=False)


def _moves(model: Any, device: Any) -> bool:
    """Whether a model can be moved. A quantised one cannot: LmgymError if it is on another kind of device."""
    if not quantization.is_quantised(model):
        return True
    here = next(model.parameters()).device
    if torch.device(device).type != here.type:
        raise LmgymError(f"a packed model cannot be moved: it is on {here}, not on {device}")
    return False


def _plain_model(model: Any) -> Any:
    """The model itself. Raises LmgymError if lmgym cannot train it."""
    if type(model).__module__.split(".")[0] == "peft":
        raise LmgymError(
            "the model is wrapped by peft; give the plain model to AutoModelForCausalLMWithValueHead.from_pretrained "
            "with its peft_config"
        )
    if not (hasattr(model, "get_output_embeddings") and hasattr(model, "config")):
        raise LmgymError(f"the model is a {type(model).__name__}; give a causal model of Hugging Face's transformers")
    if getattr(model.config, "is_encoder_decoder", False):
        raise LmgymError("the model is an encoder-decoder; a conversation is one sequence here, so give a causal one")
    return model


def _lora(given: Any) -> dict[str, Any]:
    """Rank, alpha and targets of peft's LoraConfig. Raises LmgymError for any other option."""
    if type(given).__name__ != "LoraConfig":
        raise LmgymError(f"peft_config is a {type(given).__name__}; lmgym trains peft's LoraConfig")
    taken = {"r", "lora_alpha", "lora_dropout", "target_modules", "task_type", "inference_mode", "peft_version"}
    taken |= {"base_model_name_or_path", "revision"}
    usual = type(given)().to_dict()
    for key, value in given.to_dict().items():
        if key not in taken and value != usual[key]:
            raise LmgymError(f"peft_config: {key} is {value!r}, and lmgym has {usual[key]!r} only; remove it")
    if given.lora_dropout:
        warn("peft_config: lora_dropout is not applied: dropout is off in RL", stacklevel=4)
    targets = given.target_modules
    return {
        "rank": given.r,
        "alpha": given.lora_alpha,
        "targets": sorted(targets) if isinstance(targets, set) else targets,  # None: peft's choice for the family
    }
