"""The tokenizer of the bundled model: one token per word of the closed vocabulary."""

from __future__ import annotations

from typing import Any

from kvsearch.tasks.synthetic import vocabulary as v


def tokenizer() -> Any:
    """Return a fast tokenizer that splits at white space and puts `<bos>` in front; unknown words become `<unk>`."""
    from tokenizers import Tokenizer
    from tokenizers.models import WordLevel
    from tokenizers.pre_tokenizers import WhitespaceSplit
    from tokenizers.processors import TemplateProcessing
    from transformers import PreTrainedTokenizerFast

    words = Tokenizer(WordLevel(dict(v.TOKEN_ID), unk_token=v.UNK))
    words.pre_tokenizer = WhitespaceSplit()
    words.post_processor = TemplateProcessing(single=f"{v.BOS} $A", special_tokens=[(v.BOS, v.TOKEN_ID[v.BOS])])
    return PreTrainedTokenizerFast(
        tokenizer_object=words,
        pad_token=v.PAD,
        bos_token=v.BOS,
        eos_token=v.EOS,
        unk_token=v.UNK,
        padding_side="left",
        model_max_length=4096,
        clean_up_tokenization_spaces=False,
    )
