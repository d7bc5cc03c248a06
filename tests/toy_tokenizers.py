"""Small tokenizers of both kinds whose tokens are known: single bytes, and what a few merges make of them."""

from collections.abc import Sequence
from typing import Any

from transformers import PreTrainedTokenizerFast

SPACE = "\u2581"


def byte_level(merges: Sequence[str], end: str = "<eos>", template: str | None = None) -> PreTrainedTokenizerFast:
    """GPT-2's kind: control tokens 0 <pad>, 1 `end`, then 256 bytes, then a token for each merge such as "t h"."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

    words = ["<pad>", end, *sorted(pre_tokenizers.ByteLevel.alphabet())]
    tokenizer = Tokenizer(models.BPE(**_merged(words, merges)))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(token, special=True) for token in ("<pad>", end)])
    return _wrapped(tokenizer, end, template)


def sentence_piece(letters: str, merges: Sequence[str], end: str = "</s>") -> PreTrainedTokenizerFast:
    """SentencePiece's kind, as Gemma's: spaces are U+2581, and letters without a token are spelled in bytes."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers

    words = ["<unk>", "<pad>", end, *(f"<0x{byte:02X}>" for byte in range(256)), SPACE, *letters]
    tokenizer = Tokenizer(models.BPE(**_merged(words, merges), byte_fallback=True, unk_token="<unk>", fuse_unk=True))
    tokenizer.normalizer = normalizers.Replace(" ", SPACE)
    tokenizer.decoder = decoders.Sequence([decoders.Replace(SPACE, " "), decoders.ByteFallback(), decoders.Fuse()])
    tokenizer.add_special_tokens([AddedToken(token, special=True) for token in ("<unk>", "<pad>", end)])
    return _wrapped(tokenizer, end, None, unk_token="<unk>")


def _merged(words: list[str], merges: Sequence[str]) -> dict[str, Any]:
    pairs = [tuple(merge.split()) for merge in merges]
    return {"vocab": {word: id for id, word in enumerate([*words, *map("".join, pairs)])}, "merges": pairs}


def _wrapped(tokenizer: Any, end: str, template: str | None, **names: str) -> PreTrainedTokenizerFast:
    made = PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token="<pad>", eos_token=end, **names)
    made.chat_template = template
    return made
