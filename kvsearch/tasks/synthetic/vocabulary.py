"""The closed vocabulary of the bundled models' language, 302 words, and their tokenizer: one token per word."""

from __future__ import annotations

from typing import Any

from kvsearch.tasks.dataset_task import read_shipped

_LISTS = {name: tuple(words.split()) for name, words in read_shipped("vocabulary").items()}
PAD, BOS, EOS, UNK = _LISTS["special"]
ORDINALS = _LISTS["ordinals"]
NUMBERS = _LISTS["numbers"]
KEYS = _LISTS["keys"]
VALUES = _LISTS["values"]
VARIABLES = _LISTS["variables"]
CANDIDATES = _LISTS["candidates"]
NOUNS = _LISTS["nouns"]
VERBS = _LISTS["verbs"]
ADJECTIVES = _LISTS["adjectives"]
PLACES = _LISTS["places"]
WORDS = tuple(word for words in _LISTS.values() for word in words)
TOKEN_ID = {word: index for index, word in enumerate(WORDS)}


def tokenizer() -> Any:
    """Return a fast tokenizer that splits at white space and puts `<bos>` in front; unknown words become `<unk>`."""
    from tokenizers import Tokenizer
    from tokenizers.models import WordLevel
    from tokenizers.pre_tokenizers import WhitespaceSplit
    from tokenizers.processors import TemplateProcessing
    from transformers import PreTrainedTokenizerFast

    words = Tokenizer(WordLevel(dict(TOKEN_ID), unk_token=UNK))
    words.pre_tokenizer = WhitespaceSplit()
    words.post_processor = TemplateProcessing(single=f"{BOS} $A", special_tokens=[(BOS, TOKEN_ID[BOS])])
    return PreTrainedTokenizerFast(
        tokenizer_object=words,
        pad_token=PAD,
        bos_token=BOS,
        eos_token=EOS,
        unk_token=UNK,
        padding_side="left",
        model_max_length=4096,
        clean_up_tokenization_spaces=False,
    )
