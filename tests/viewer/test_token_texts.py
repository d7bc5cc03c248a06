"""The texts of single tokens: joined they equal the decoded text, in the order of the tokens."""

from itertools import accumulate

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from lmgym.text.tokens import token_texts
from tests.viewer.sample_runs import byte_tokenizer

TEXT = ["hello wörld 世界 don't stop . 🙂 the of and the of and 👨‍👩‍👧"]


def byte_level() -> Tokenizer:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer, tokenizer.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    special = ["<eos>", "<|im_end|>"]
    tokenizer.train_from_iterator(
        TEXT,
        trainers.BpeTrainer(vocab_size=300, special_tokens=special, initial_alphabet=alphabet, show_progress=False),
    )
    return tokenizer


def sentence_pieces() -> Tokenizer:
    """As Llama's: a leading space that decoding drops, and bytes of which a whole run is text or none of it."""
    tokenizer = Tokenizer(models.BPE(byte_fallback=True, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    special = ["<unk>", "<s>", *(f"<0x{byte:02X}>" for byte in range(256))]
    tokenizer.train_from_iterator(
        ["hello the of and"], trainers.BpeTrainer(vocab_size=300, special_tokens=special, show_progress=False)
    )
    steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    tokenizer.decoder = decoders.Sequence(steps)
    return tokenizer


def word_pieces() -> Tokenizer:
    """As BERT's: a space between words comes from the decoder, which also removes some."""
    tokenizer = Tokenizer(models.WordPiece(unk_token="[UNK]"))
    tokenizer.pre_tokenizer, tokenizer.decoder = pre_tokenizers.BertPreTokenizer(), decoders.WordPiece()
    tokenizer.train_from_iterator(
        TEXT, trainers.WordPieceTrainer(vocab_size=150, special_tokens=["[UNK]", "[CLS]"], show_progress=False)
    )
    return tokenizer


TOKENIZERS = {one.__name__: one() for one in (byte_tokenizer, byte_level, sentence_pieces, word_pieces)}


@pytest.mark.parametrize("name", TOKENIZERS)
@given(data=st.data())
def test_any_ids_are_the_pieces_of_their_text(name: str, data: st.DataObject) -> None:
    tokenizer = TOKENIZERS[name]
    ids = data.draw(st.lists(st.integers(0, tokenizer.get_vocab_size() - 1), max_size=40))
    whole = tokenizer.decode(ids, skip_special_tokens=False)
    pieces = token_texts(tokenizer, ids)
    assert len(pieces) == len(ids) and "".join(pieces) == whole
    # A token's text ends where the decoded text of all tokens up to it stops being a beginning of the whole.
    begun = [tokenizer.decode(ids[:count], skip_special_tokens=False) for count in range(1, len(ids) + 1)]
    shared = [sum(accumulate((a == b for a, b in zip(text, whole, strict=False)), min)) for text in begun]
    assert list(accumulate(map(len, pieces))) == list(accumulate(shared, max))


def test_control_tokens_are_visible_and_a_character_of_several_tokens_is_whole() -> None:
    tokenizer = TOKENIZERS["byte_tokenizer"]
    vocabulary = tokenizer.get_vocab()
    ids = [1, vocabulary["a"], vocabulary["Ã"], vocabulary["©"], 0]  # é is the bytes C3 A9, which stand as Ã and ©
    assert token_texts(tokenizer, ids) == ["<|im_start|>", "a", "", "é", "<eos>"]
