"""What every contender is given: the model, the tokenizer, the prompts, the lengths and the reward, all from a seed.

Contenders run in virtual environments of their own, so nothing here imports lmgym; torch and transformers are imported
by the functions that write a workload, not by those that read one.

    python -m benchmarks.workloads FOLDER [SEED]
"""

import json
import random
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

VOCABULARY = 32_000
SPECIAL = ("<pad>", "<bos>", "<eos>", "<unk>")
SHAPE: dict[str, Any] = {
    "hidden_size": 288,
    "intermediate_size": 768,
    "num_hidden_layers": 6,
    "num_attention_heads": 6,
    "num_key_value_heads": 6,
    "tie_word_embeddings": True,
    "max_position_embeddings": 1024,
}


@dataclass(frozen=True)
class Workload:
    """Prompts as ids, answers per prompt, and the exact number of new tokens of each answer."""

    name: str
    prompts: list[list[int]]
    completions: int
    new_tokens: int
    seed: int

    @property
    def rows(self) -> list[list[int]]:
        """One prompt per answer, answers to the same prompt side by side."""
        return [prompt for prompt in self.prompts for _ in range(self.completions)]


def w1(seed: int = 0) -> Workload:
    """W1: 8 prompts of 90 to 110 random tokens (about 100), 8 answers each, exactly 128 new tokens."""
    draw = random.Random(seed)
    lengths = [draw.randint(90, 110) for _ in range(8)]
    prompts = [[draw.randrange(len(SPECIAL), VOCABULARY) for _ in range(length)] for length in lengths]
    return Workload("W1", prompts, completions=8, new_tokens=128, seed=seed)


def reward(ids: Sequence[int]) -> float:
    """The same Python reward for everybody: the share of even ids in an answer."""
    return sum(1 - token % 2 for token in ids) / len(ids)


def text(ids: Sequence[int]) -> str:
    """Words that the tokenizer turns into exactly these ids."""
    return " ".join(f"t{token}" for token in ids)


def write(workload: Workload, folder: Path) -> None:
    """Save workload.json, and under model/ a randomly initialised 15M Llama with a tokenizer of one word per id."""
    import torch
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

    torch.manual_seed(workload.seed)
    words = {word: i for i, word in enumerate(SPECIAL)} | {f"t{i}": i for i in range(len(SPECIAL), VOCABULARY)}
    rules = Tokenizer(models.WordLevel(words, unk_token="<unk>"))
    rules.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    names = {f"{name[1:-1]}_token": name for name in SPECIAL}
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=rules, padding_side="left", **names)
    for prompt in workload.prompts:
        assert tokenizer(text(prompt))["input_ids"] == prompt
    config = LlamaConfig(vocab_size=VOCABULARY, pad_token_id=0, bos_token_id=1, eos_token_id=2, **SHAPE)
    LlamaForCausalLM(config).save_pretrained(folder / "model")
    tokenizer.save_pretrained(folder / "model")
    (folder / "workload.json").write_text(json.dumps(asdict(workload)), encoding="utf-8")


def read(folder: Path) -> Workload:
    """The workload that `write` has saved."""
    return Workload(**json.loads((folder / "workload.json").read_text(encoding="utf-8")))


if __name__ == "__main__":
    write(w1(int(sys.argv[2]) if len(sys.argv) > 2 else 0), Path(sys.argv[1]))
