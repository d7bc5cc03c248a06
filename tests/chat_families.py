"""Five families of chat models in small: the architecture, the control tokens and the chat template of each, and what
plain transformers makes of a conversation with them."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib.resources import files
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM

from lmgym.models.policy import Policy
from lmgym.types import Episode, Turn
from tests import models
from tests.models import sharpen

# Like SmolLM2's: ChatML. It writes its own system message if the conversation has none, and it ignores tools.
SMOLLM2 = (
    "{% if messages[0].role != 'system' %}<|im_start|>system\nAnswer well.<|im_end|>\n{% endif %}"
    "{% for message in messages %}<|im_start|>{{ message.role }}\n{{ message.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
# As Mistral's: users and assistants in turn, no header before an answer, the system message and the tools before the
# last and the first question.
MISTRAL = (
    "{{ bos_token }}{% if messages[0].role == 'system' %}{% set system, talk = messages[0].content, messages[1:] %}"
    "{% else %}{% set system, talk = none, messages %}{% endif %}"
    "{% set asked = talk | selectattr('role', 'in', ['user', 'assistant']) | list %}"
    "{% for message in asked %}{% if (message.role == 'user') != (loop.index0 % 2 == 0) and not tools %}"
    "{{ raise_exception('after a question comes an answer') }}{% endif %}{% endfor %}"
    "{% for message in talk %}"
    "{% if message.role == 'user' %}"
    "{% if tools and loop.first %}[AVAILABLE_TOOLS] {{ tools | tojson }}[/AVAILABLE_TOOLS]{% endif %}"
    "[INST] {% if system is not none and loop.first %}{{ system }}\n\n{% endif %}{{ message.content }}[/INST]"
    "{% elif message.role == 'tool' %}[TOOL_RESULTS] {{ {'content': message.content} | tojson }}[/TOOL_RESULTS]"
    "{% else %} {{ message.content }}{{ eos_token }}{% endif %}{% endfor %}"
)


@dataclass(frozen=True)
class Family:
    """A family: the kind of its model as transformers names it, what its answers end with, its other control tokens,
    and its chat template, or the file of it that TRL brings along.

    Example: FAMILIES["gemma"].policy()"""

    kind: str
    end: str
    control: tuple[str, ...]
    template: str
    more: Mapping[str, Any]

    def tokenizer(self) -> Any:
        """Bytes, and the family's control tokens."""
        tokenizer = models.byte_tokenizer()
        tokenizer.add_special_tokens({"additional_special_tokens": list(self.control)})
        tokenizer.eos_token = self.end
        template = self.template
        if template.endswith(".jinja"):
            template = (files("trl") / "chat_templates" / template).read_text(encoding="utf-8")
        tokenizer.chat_template = template
        return tokenizer

    def policy(self) -> Policy:
        """A tiny model of the family's architecture, with large random weights."""
        tokenizer = self.tokenizer()
        config = AutoConfig.for_model(
            self.kind, vocab_size=len(tokenizer), hidden_size=16, intermediate_size=24, num_hidden_layers=2,
            num_attention_heads=2, num_key_value_heads=1, head_dim=8, max_position_embeddings=4096,
            bos_token_id=1, eos_token_id=tokenizer.eos_token_id, pad_token_id=0, **self.more,
        )  # fmt: skip
        torch.manual_seed(0)
        model = sharpen(AutoModelForCausalLM.from_config(config), 0.12)
        with torch.no_grad():  # so that many answers end by themselves
            model.get_output_embeddings().weight[tokenizer.eos_token_id] *= 4
        return Policy(model, tokenizer)


CHATML = ("<|im_start|>", "<|im_end|>")
HEADERS = ("<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>", "<|eom_id|>", "<|python_tag|>")
INST = ("[INST]", "[/INST]", "[AVAILABLE_TOOLS]", "[/AVAILABLE_TOOLS]", "[TOOL_RESULTS]", "[/TOOL_RESULTS]", "</s>")
WINDOW = 48  # tokens that a layer with a window sees
FAMILIES = {
    "smollm2": Family("llama", "<|im_end|>", CHATML, SMOLLM2, {}),
    "qwen": Family("qwen3", "<|im_end|>", CHATML, "qwen3.jinja", {}),
    "llama 3": Family("llama", "<|eot_id|>", HEADERS, "llama3_1.jinja", {}),
    "gemma": Family(
        "gemma3_text", "<end_of_turn>", ("<start_of_turn>", "<end_of_turn>"), "gemma3.jinja",
        {"sliding_window": WINDOW, "layer_types": ["sliding_attention", "full_attention"]},
    ),
    "mistral": Family("mistral", "</s>", INST, MISTRAL, {"sliding_window": WINDOW}),
}  # fmt: skip


def expected_before(tokenizer: Any, request: Mapping[str, Any], turns: Sequence[Turn]) -> list[int]:
    """The tokens before the answer to a request, by transformers' own rendering. Answers of the policy stand in it as
    words; where a word is, the tokens that were sampled are put, and what the template writes behind it follows.
    `request` has `messages`, in which those of the policy name their `turn`, and `tools`."""
    tools = {"tools": request["tools"]} if request.get("tools") else {}
    ids, messages, last, ended = list[int](), list[dict[str, str]](), "", False

    def read() -> None:  # what the policy reads behind its last answer, when it is asked again
        text = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True, **tools)
        piece = tokenizer(text.partition(last)[2] if last else text, add_special_tokens=False)["input_ids"]
        ids.extend(piece[1:] if ended else piece)  # the answer holds the end mark already

    for place, message in enumerate(request["messages"]):
        if "turn" in message:
            read()
            turn = turns[message["turn"]]
            ids += turn.action_ids
            last, ended = f"answer-number-{place}-", turn.stop == "eos"
            message = {"role": message["role"], "content": last}
        messages.append(dict(message))
    read()
    return ids


def contexts(episode: Episode) -> list[list[int]]:
    """The tokens before each turn: all of its row."""
    found = list[list[int]]()
    for row in episode.rows():
        ids = list[int]()
        for turn in row:
            found.append([*ids, *turn.prompt_ids])
            ids = [*found[-1], *turn.action_ids]
    return found


@torch.no_grad()
def forced(model: Any, episode: Episode, temperature: float) -> torch.Tensor:
    """The log-probabilities of all tokens that were sampled, by one pass of plain transformers over each row."""
    found = []
    for row in episode.rows():
        ids, places = list[int](), list[int]()
        for turn in row:
            ids += turn.prompt_ids
            places += range(len(ids), len(ids) + len(turn.action_ids))
            ids += turn.action_ids
        hidden = model.base_model(torch.tensor([ids])).last_hidden_state[0, torch.tensor(places) - 1]
        logits = model.get_output_embeddings()(hidden) / temperature
        found.append(logits.log_softmax(-1)[torch.arange(len(places)), torch.tensor(ids)[places]])
    return torch.cat(found)
