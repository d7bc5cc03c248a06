"""What every contender is given: the model, the tokenizer, the prompts, the lengths and the reward, all from a seed.

Contenders run in virtual environments of their own, so nothing here imports lmgym; torch and transformers are imported
by the functions that write a workload, not by those that read one.

    python -m benchmarks.workloads w1 FOLDER [SEED]
"""

import json
import math
import random
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

SPECIAL = ("<pad>", "<bos>", "<eos>", "<unk>")
EOS = SPECIAL.index("<eos>")
SPECIAL_IDS = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": EOS}
LLAMA_15M: dict[str, Any] = {
    "model_type": "llama",
    "vocab_size": 32_000,
    "hidden_size": 288,
    "intermediate_size": 768,
    "num_hidden_layers": 6,
    "num_attention_heads": 6,
    "num_key_value_heads": 6,
    "tie_word_embeddings": True,
    "max_position_embeddings": 1024,
}
SMOLLM2_135M: dict[str, Any] = {
    "model_type": "llama",
    "vocab_size": 49_152,
    "hidden_size": 576,
    "intermediate_size": 1536,
    "num_hidden_layers": 30,
    "num_attention_heads": 9,
    "num_key_value_heads": 3,
    "tie_word_embeddings": True,
    "max_position_embeddings": 8192,
}
GEMMA3_270M: dict[str, Any] = {
    "model_type": "gemma3_text",
    "vocab_size": 262_144,
    "hidden_size": 640,
    "intermediate_size": 2048,
    "num_hidden_layers": 18,
    "num_attention_heads": 4,
    "num_key_value_heads": 1,
    "head_dim": 256,
    "query_pre_attn_scalar": 256,
    "sliding_window": 512,
    "tie_word_embeddings": True,
    "max_position_embeddings": 32_768,
}
QWEN25_HALF_B: dict[str, Any] = {
    "model_type": "qwen2",
    "vocab_size": 151_936,
    "hidden_size": 896,
    "intermediate_size": 4864,
    "num_hidden_layers": 24,
    "num_attention_heads": 14,
    "num_key_value_heads": 2,
    "tie_word_embeddings": True,
    "max_position_embeddings": 32_768,
}
LLAMA32_1B: dict[str, Any] = {
    "model_type": "llama",
    "vocab_size": 128_256,
    "hidden_size": 2048,
    "intermediate_size": 8192,
    "num_hidden_layers": 16,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "tie_word_embeddings": True,
    "max_position_embeddings": 131_072,
}


@dataclass(frozen=True)
class Workload:
    """Prompts as ids, answers per prompt, the number of new tokens of each answer, and the model's configuration.

    `lengths` has one number for each answer, in the order of `rows`; where it is empty, each answer has exactly
    `new_tokens`, which is the most in any case.
    """

    name: str
    prompts: list[list[int]]
    completions: int
    new_tokens: int
    seed: int
    lengths: list[int] = field(default_factory=list)
    shape: Mapping[str, Any] = field(default_factory=lambda: dict(LLAMA_15M))

    @property
    def rows(self) -> list[list[int]]:
        """One prompt per answer, answers to the same prompt side by side."""
        return [prompt for prompt in self.prompts for _ in range(self.completions)]

    @property
    def row_lengths(self) -> list[int]:
        """New tokens of each answer."""
        return self.lengths or [self.new_tokens] * len(self.rows)

    @property
    def sampled(self) -> int:
        """New tokens of a step, all answers together."""
        return sum(self.row_lengths)

    def smaller(self, prompts: int | None, completions: int | None, new_tokens: int | None) -> "Workload":
        """The first prompts, fewer answers to each, and shorter ones: for trying a benchmark."""
        one = replace(
            self,
            prompts=self.prompts[:prompts],
            completions=min(self.completions, completions or self.completions),
            new_tokens=min(self.new_tokens, new_tokens or self.new_tokens),
        )
        if not self.lengths or one == self:
            return one
        return replace(one, lengths=ragged(len(one.rows), one.new_tokens / 4, one.new_tokens, self.seed))


def w1(seed: int = 0) -> Workload:
    """W1, short: 8 prompts of 90 to 110 random tokens (about 100), 8 answers each, exactly 128 new tokens."""
    draw = random.Random(seed)
    return Workload("W1", random_prompts(draw, [draw.randint(90, 110) for _ in range(8)]), 8, 128, seed)


def w2(seed: int = 0) -> Workload:
    """W2, few-shot: 8 prompts of 512 random tokens, 8 answers each, exactly 64 new tokens."""
    return Workload("W2", random_prompts(random.Random(seed), [512] * 8), 8, 64, seed)


def w3(seed: int = 0) -> Workload:
    """W3, ragged: W1 with 1 to 256 new tokens, mean about 64."""
    one = w1(seed)
    return replace(one, name="W3", new_tokens=256, lengths=ragged(len(one.rows), 65.5, 256, seed))


def w5(seed: int = 0, shape: Mapping[str, Any] = QWEN25_HALF_B) -> Workload:
    """W5, for a GPU: 32 prompts of 512 random tokens, 8 answers each, exactly 512 new tokens."""
    prompts = random_prompts(random.Random(seed), [512] * 32, shape["vocab_size"])
    return Workload("W5", prompts, 8, 512, seed, shape=shape)


def w6(seed: int = 0, name: str = "W6", shape: Mapping[str, Any] = SMOLLM2_135M) -> Workload:
    """W6, SmolLM2-135M's shape: 4 prompts of 100 random tokens, 8 answers each, exactly 96 new tokens."""
    prompts = random_prompts(random.Random(seed), [100] * 4, shape["vocab_size"])
    return Workload(name, prompts, 8, 96, seed, shape=shape)


def w7(seed: int = 0) -> Workload:
    """W7, Gemma 3 270M's shape (a large vocabulary, sliding windows): W6 otherwise."""
    return w6(seed, "W7", GEMMA3_270M)


def w8(seed: int = 0) -> Workload:
    """W8, short answers: SmolLM2-135M's shape, 8 prompts of 50 random tokens, 8 answers each, exactly 24 new tokens."""
    prompts = random_prompts(random.Random(seed), [50] * 8, SMOLLM2_135M["vocab_size"])
    return Workload("W8", prompts, 8, 24, seed, shape=SMOLLM2_135M)


def w9(seed: int = 0) -> Workload:
    """W9, solved examples: SmolLM2-135M's shape, 4 prompts of 480 random tokens of which the first 400 are the same in
    all, 8 answers each, exactly 48 new tokens."""
    draw, vocabulary = random.Random(seed), SMOLLM2_135M["vocab_size"]
    (examples,) = random_prompts(draw, [400], vocabulary)
    prompts = [examples + question for question in random_prompts(draw, [80] * 4, vocabulary)]
    return Workload("W9", prompts, 8, 48, seed, shape=SMOLLM2_135M)


BY_NAME = {"w1": w1, "w2": w2, "w3": w3, "w6": w6, "w7": w7, "w8": w8, "w9": w9}
SMALL = ["w1", "w2", "w3"]


def random_prompts(
    draw: random.Random, lengths: Sequence[int], vocabulary: int = LLAMA_15M["vocab_size"]
) -> list[list[int]]:
    """Prompts of these lengths; no special token is in them."""
    return [[draw.randrange(len(SPECIAL), vocabulary) for _ in range(length)] for length in lengths]


def ragged(count: int, scale: float, most: int, seed: int) -> list[int]:
    """Lengths like those of sampled answers, many short and a few long ones: the quantiles of an exponential
    distribution, cut off at `most`, shuffled. Quantiles, so that their mean does not hang on the seed.

    Example:
        >>> lengths = ragged(64, 65.5, 256, seed=0)
        >>> min(lengths), max(lengths), sum(lengths) / 64
        (1, 256, 64.1875)
    """
    quantiles = [-scale * math.log(1 - (place + 0.5) / count) for place in range(count)]
    lengths = [min(max(round(length), 1), most) for length in quantiles]
    random.Random(seed).shuffle(lengths)
    return lengths


def reward(ids: Sequence[int]) -> float:
    """The same Python reward for everybody: the mean of the ids' last three digits, in thousandths. Two answers hardly
    ever earn the same, so nobody may leave one out of the update for want of an advantage."""
    return sum(token % 1000 for token in ids) / len(ids) / 1000


def check_lengths(workload: Workload, answers: Sequence[Sequence[int]]) -> None:
    """Raise ValueError unless these are as long as the workload says: a contender that does other work is no rival."""
    found = [len(answer) for answer in answers]
    if found != workload.row_lengths:
        raise ValueError(f"answers of {found} tokens where {workload.name} wants {workload.row_lengths}")


def text(ids: Sequence[int]) -> str:
    """Words that the tokenizer turns into exactly these ids."""
    return " ".join(f"t{token}" for token in ids)


def write(workload: Workload, folder: Path) -> None:
    """Save workload.json, and under model/ the randomly initialised model (fp32) with a tokenizer of one word per
    id."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM
    from transformers.utils import logging

    logging.disable_progress_bar()
    torch.manual_seed(workload.seed)
    fields = dict(workload.shape)
    tokenizer = word_tokenizer(fields["vocab_size"])
    for prompt in workload.prompts:
        assert tokenizer(text(prompt))["input_ids"] == prompt
    config = AutoConfig.for_model(fields.pop("model_type"), **SPECIAL_IDS, **fields)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    for parameter in model.parameters():  # models are published on bf16's grid
        parameter.data = parameter.data.bfloat16().float()
    model.save_pretrained(folder / "model")
    tokenizer.save_pretrained(folder / "model")
    save(workload, folder)


def word_tokenizer(vocabulary: int, marks: Sequence[str] = ()) -> Any:
    """The special tokens, then a word for each id of the vocabulary, of which `marks` are the last ones."""
    from tokenizers import AddedToken, Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    words = {word: i for i, word in enumerate(SPECIAL)}
    words |= {f"t{i}": i for i in range(len(SPECIAL), vocabulary - len(marks))}
    rules = Tokenizer(models.WordLevel(words, unk_token="<unk>"))
    rules.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    rules.add_special_tokens([AddedToken(mark, special=True, normalized=False) for mark in marks])
    names = {f"{name[1:-1]}_token": name for name in SPECIAL}
    more = {"additional_special_tokens": list(marks)} if marks else {}
    return PreTrainedTokenizerFast(tokenizer_object=rules, padding_side="left", **names, **more)


def save(workload: Workload, folder: Path) -> None:
    """Write workload.json."""
    (folder / "workload.json").write_text(json.dumps(asdict(workload)), encoding="utf-8")


def read(folder: Path) -> Workload:
    """The workload that `write` has saved."""
    return Workload(**json.loads((folder / "workload.json").read_text(encoding="utf-8")))


def pictures(folder: Path) -> list[Path]:
    """The pictures of a saved workload (pictured.py), in the order in which they stand before its prompts, new ones in
    each step; none if its prompts are texts alone."""
    return sorted((folder / "pictures").glob("*.png"))


if __name__ == "__main__":
    write(BY_NAME[sys.argv[1]](int(sys.argv[3]) if len(sys.argv) > 3 else 0), Path(sys.argv[2]))
