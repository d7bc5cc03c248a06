"""Train a small text classifier on a task's labelled texts, for `learned_reward` to read.

    python examples/train_classifier.py imdb path=aclImdb --text review --out models/sentiment
    python examples/train_classifier.py daily_dialog --text reference --label intent --out models/intent

Then, in a recipe:

    rewards:
      learned_reward: {model: models/sentiment, label: 1, truncation: right}

What comes out is a Hugging Face checkpoint (config.json, model.safetensors, tokenizer.json) of a BERT of one layer with
random initial weights, with a tokenizer learnt from the same texts, and training.json: how it was made, and the share
of right answers on held-out texts with its 95 % interval, asked through lmgym's own reward. No network, one CPU core,
a minute for a thousand reviews.

`--slice 0 0.3` trains on the texts whose hash falls into that part of [0, 1): a second classifier of `--slice 0.3 0.6`
has seen none of them, and can judge what the first one was the reward of.
"""

import argparse
import json
import random
import sys
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import yaml
from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers
from torch.nn.functional import cross_entropy
from transformers import BertConfig, BertForSequenceClassification, PreTrainedTokenizerFast

from lmgym.core.errors import LmgymError
from lmgym.rewards.learned import batched_forward, scorers
from lmgym.rewards.learned.rows import text_rows
from lmgym.stats.intervals import share_interval
from lmgym.tasks.base import hash_fraction, load_task
from lmgym.text.chat import plain_text
from lmgym.types import Example

SPECIAL = ["[PAD]", "[UNK]", "[CLS]", "[SEP]"]
PADDING, UNKNOWN = 0, 1  # their ids


def labelled(examples: Sequence[Example], text: str, label: str) -> list[tuple[str, str]]:
    """(text, label) of each example. `text` is prompt, reference, both, or a key of meta; `label` a key of meta.

    Raises LmgymError, naming the example, where there is no such text or label.

    Example:
        >>> labelled([Example("a/0", "So", (" good",), {"label": 1})], "both", "label")
        [('So good', '1')]
    """
    found = []
    for example in examples:
        said = plain_text(example.prompt)
        reference = example.references[0] if example.references else None
        texts = {**example.meta, "prompt": said, "reference": reference, "both": said + (reference or "")}
        for key, place in ((text, texts), (label, example.meta)):
            if place.get(key) is None:
                known = ", ".join(sorted(name for name, value in place.items() if value is not None))
                raise LmgymError(f"example '{example.id}' has no '{key}'; it has {known or 'nothing'}")
        if not isinstance(texts[text], str):
            raise LmgymError(f"example '{example.id}': '{text}' must be a text, not {texts[text]!r}")
        found.append((texts[text], str(example.meta[label])))
    return found


def byte_pairs(texts: Sequence[str], size: int, longest: int) -> PreTrainedTokenizerFast:
    """A lower-case tokenizer of `size` tokens at most, learnt from the texts, with [CLS] and [SEP] around each. It
    knows every byte, so [UNK] stands for nothing but what an epoch hides. The same texts give the same tokens."""
    tokenizer = Tokenizer(models.BPE(unk_token="[UNK]"))
    tokenizer.normalizer = normalizers.Lowercase()
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=True)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=size, special_tokens=SPECIAL, initial_alphabet=sorted(alphabet), show_progress=False
    )
    tokenizer.train_from_iterator(texts, trainer)
    tokenizer.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]", special_tokens=[(name, tokenizer.token_to_id(name)) for name in ("[CLS]", "[SEP]")]
    )
    pad, unknown, begin, end = SPECIAL
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, model_max_length=longest, model_input_names=["input_ids", "attention_mask"],
        pad_token=pad, unk_token=unknown, cls_token=begin, sep_token=end,
    )  # fmt: skip


def shown(row: Sequence[int], crop: int, mask: float, draw: random.Random) -> list[int]:
    """What an epoch shows of a text's ids: a run of `crop` tokens between [CLS] and [SEP], a share `mask` of them
    unknown. So a thousand texts are never twice the same, and the classifier learns to judge from a few words."""
    first = draw.randrange(max(1, len(row) - 2 - crop + 1)) + 1
    run = row[first : min(first + crop, len(row) - 1)]
    return [row[0], *(UNKNOWN if draw.random() < mask else id for id in run), row[-1]]


def train(model: BertForSequenceClassification, rows: list[list[int]], labels: list[int], given: Any) -> None:
    """AdamW on the cross-entropy, the learning rate falling linearly to zero; one line an epoch."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=given.learning_rate, weight_decay=given.weight_decay)
    draw, step = random.Random(given.seed), 0
    steps = given.epochs * -(-len(rows) // given.batch)
    model.train()
    for epoch in range(given.epochs):
        total, order = 0.0, draw.sample(range(len(rows)), len(rows))
        for begin in range(0, len(rows), given.batch):
            places = order[begin : begin + given.batch]
            ids = padded([shown(rows[place], given.crop, given.mask, draw) for place in places])
            wanted = torch.tensor([labels[place] for place in places])
            loss = cross_entropy(model(input_ids=ids, attention_mask=(ids != PADDING).long()).logits, wanted)
            optimizer.zero_grad()
            loss.backward()
            for group in optimizer.param_groups:
                group["lr"] = given.learning_rate * (1 - step / steps)
            optimizer.step()
            total, step = total + loss.item() * len(places), step + 1
        print(f"epoch {epoch + 1:>3}  loss {total / len(rows):.3f}", flush=True)
    model.eval()


def padded(rows: Sequence[Sequence[int]]) -> torch.Tensor:
    """Rows of ids [N T], filled up on the right."""
    width = max(map(len, rows))
    return torch.tensor([[*row, *[PADDING] * (width - len(row))] for row in rows])


def held_out(folder: Path, pairs: Sequence[tuple[str, str]]) -> dict[str, Any]:
    """How often the saved classifier is right, with its interval, and how often its most frequent label would be.

    The texts go the way of `learned_reward`, cut on the right where they are too long.
    """
    scorer = scorers.load_scorer("learned_reward", "classifier", str(folder), device="cpu")
    rows = text_rows(replace(scorer, truncation="right"), [text for text, _ in pairs])
    said = [scorer.labels[max(range(len(row)), key=row.__getitem__)] for row in batched_forward.logits(scorer, rows)]
    right = share_interval([float(label == own) for (_, label), own in zip(pairs, said, strict=True)])
    most = Counter(label for _, label in pairs).most_common(1)[0][1] / len(pairs)
    return {"accuracy": right.mean, "low": right.low, "high": right.high, "texts": len(pairs), "most": most}


def main(arguments: Sequence[str] | None = None) -> None:
    given = _parser().parse_args(arguments)
    torch.manual_seed(given.seed)
    settings = {key: yaml.safe_load(value) for key, value in (one.split("=", 1) for one in given.settings)}
    low, high = given.slice
    pairs = labelled(load_task(given.task, given.split, **settings), given.text, given.label)
    pairs = [(text, label) for text, label in pairs if low <= hash_fraction(text) < high]
    tested = labelled(load_task(given.task, given.test_split, **settings), given.text, given.label)
    names = sorted({label for _, label in pairs})
    unknown = {label for _, label in tested} - {*names}
    if len(names) < 2 or unknown:
        sys.exit(f"the texts to train on have the labels {names}, those of '{given.test_split}' besides {unknown}")
    tokenizer = byte_pairs([text for text, _ in pairs], given.vocabulary, given.longest)
    config = BertConfig(
        vocab_size=len(tokenizer), hidden_size=given.width, num_hidden_layers=given.layers,
        num_attention_heads=max(1, given.width // 32), intermediate_size=2 * given.width,
        max_position_embeddings=given.longest, type_vocab_size=1, pad_token_id=PADDING,
        hidden_dropout_prob=given.dropout, classifier_dropout=given.dropout,
        id2label=dict(enumerate(names)), label2id={name: place for place, name in enumerate(names)},
    )  # fmt: skip
    model = BertForSequenceClassification(config)
    rows = tokenizer([text for text, _ in pairs], verbose=False)["input_ids"]
    train(model, rows, [names.index(label) for _, label in pairs], given)
    model.save_pretrained(given.out)
    tokenizer.save_pretrained(given.out)
    report = {**vars(given), "out": str(given.out), "trained_on": len(pairs), "held_out": held_out(given.out, tested)}
    (given.out / "training.json").write_text(json.dumps(report, indent=1), encoding="utf-8")
    found = report["held_out"]
    print(f"{len(pairs)} texts to train on; of {found['texts']} held-out ones {found['accuracy']:.3f} right "
          f"[{found['low']:.3f}, {found['high']:.3f}] (always the same label: {found['most']:.3f})")  # fmt: skip
    print(f"labels {', '.join(names)}; saved in {given.out}")


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("task", help="the name of a task")
    parser.add_argument("settings", nargs="*", metavar="key=value", help="its arguments, as path=FOLDER")
    parser.add_argument("--text", default="both", help="prompt, reference, both, or a key of meta")
    parser.add_argument("--label", default="label", help="a key of meta; several values make several labels")
    parser.add_argument("--split", default="train")
    parser.add_argument("--test-split", default="test")
    parser.add_argument("--slice", type=float, nargs=2, default=[0.0, 1.0], metavar=("FROM", "TO"))
    parser.add_argument("--out", type=Path, required=True, help="a folder for the checkpoint")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--epochs", type=int, default=20)
    parser.add_argument("--crop", type=int, default=64, help="tokens of a text that an epoch shows")
    parser.add_argument("--mask", type=float, default=0.3, help="share of them that it hides")
    parser.add_argument("--batch", type=int, default=32)
    parser.add_argument("--learning-rate", type=float, default=1e-3)
    parser.add_argument("--weight-decay", type=float, default=0.01)
    parser.add_argument("--dropout", type=float, default=0.3)
    parser.add_argument("--width", type=int, default=64)
    parser.add_argument("--layers", type=int, default=1)
    parser.add_argument("--vocabulary", type=int, default=4096)
    parser.add_argument("--longest", type=int, default=256, help="tokens that it reads")
    return parser


if __name__ == "__main__":
    main()
