"""Small tokenizers of the kinds that public checkpoints have, trained on a few sentences."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers
from transformers import PreTrainedTokenizerFast
from transformers.tokenization_python import PreTrainedTokenizer

TEXT = (
    "The meeting began at nine. Ms Okafor took the minutes and Mr Lindqvist spoke first about the harbour.\n\n"
    "Question: who was there?\nAnswer: the mayor, the engineer and seven fishermen. The code of the red door is 4711.\n"
    "Costs rose from 120 to 180 crowns in March! A new crane was ordered; it comes in June, if the ice allows it.\n"
    "会议于上午九点在市政厅开始，市长宣布新的码头将在六月完工。การประชุมเริ่มเวลาเก้านาฬิกา นายกเทศมนตรี "
)
SPECIAL = ["<unk>", "<s>", "</s>", "<pad>", "<|end|>"]
# of Llama 3 and Qwen: punctuation takes the line breaks behind it along
BREAKS_JOIN = Regex(r"[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+")


def wrapped(raw: Tokenizer, **settings: Any) -> Any:
    return PreTrainedTokenizerFast(
        tokenizer_object=raw, unk_token="<unk>", bos_token="<s>", eos_token="</s>", pad_token="<pad>", **settings
    )


def with_specials(raw: Tokenizer, template: str) -> None:
    ids = [(token, raw.token_to_id(token)) for token in ("<s>", "</s>") if token in template]
    raw.post_processor = processors.TemplateProcessing(single=template, special_tokens=ids)


def byte_level(template: str = "$A", pattern: Regex | None = None, prefix_space: bool = False) -> Any:
    """BPE over bytes, as GPT-2's; with a `pattern` as Llama 3's."""
    raw = Tokenizer(models.BPE())
    whole = pre_tokenizers.ByteLevel(add_prefix_space=prefix_space, use_regex=pattern is None)
    split = [] if pattern is None else [pre_tokenizers.Split(pattern, "isolated")]
    raw.pre_tokenizer = pre_tokenizers.Sequence([*split, whole])
    raw.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    raw.train_from_iterator(
        [TEXT] * 3, trainers.BpeTrainer(vocab_size=600, special_tokens=SPECIAL, initial_alphabet=alphabet)
    )
    with_specials(raw, template)
    return wrapped(raw)


def sentencepiece(template: str = "<s> $A") -> Any:
    """BPE whose normalizer puts a blank before every text, as Llama 2's and Mistral v0.1's."""
    raw = Tokenizer(models.BPE(unk_token="<unk>", fuse_unk=True))
    raw.normalizer = normalizers.Sequence([normalizers.Prepend("\u2581"), normalizers.Replace(" ", "\u2581")])
    raw.decoder = decoders.Sequence([decoders.Replace("\u2581", " "), decoders.Fuse(), decoders.Strip(" ", 1, 0)])
    raw.train_from_iterator(TEXT.split(" "), trainers.BpeTrainer(vocab_size=600, special_tokens=SPECIAL))
    with_specials(raw, template)
    return wrapped(raw)


def metaspace(scheme: str) -> Any:
    """BPE over words that begin with a blank, before the "first" one or "always", as newer Llama tokenizers have."""
    raw = Tokenizer(models.BPE(unk_token="<unk>", fuse_unk=True))
    raw.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme=scheme, split=False)
    raw.decoder = decoders.Metaspace(prepend_scheme=scheme, split=False)
    raw.train_from_iterator(TEXT.split(" "), trainers.BpeTrainer(vocab_size=500, special_tokens=SPECIAL))
    with_specials(raw, "<s> $A")
    return wrapped(raw)


def unigram() -> Any:
    """The likeliest pieces, as T5's and Gemma's ancestors, which end every text."""
    raw = Tokenizer(models.Unigram())
    raw.pre_tokenizer = pre_tokenizers.Metaspace()
    raw.decoder = decoders.Metaspace()
    trainer = trainers.UnigramTrainer(vocab_size=400, special_tokens=SPECIAL, unk_token="<unk>")
    raw.train_from_iterator([TEXT] * 3, trainer)
    with_specials(raw, "$A </s>")
    return wrapped(raw)


def word_pieces() -> Any:
    """Pieces of lower-case words, as BERT's, between two special tokens."""
    raw = Tokenizer(models.WordPiece(unk_token="<unk>"))
    raw.normalizer = normalizers.BertNormalizer(lowercase=True)
    raw.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    raw.decoder = decoders.WordPiece()
    raw.train_from_iterator([TEXT], trainers.WordPieceTrainer(vocab_size=400, special_tokens=SPECIAL))
    with_specials(raw, "<s> $A </s>")
    return wrapped(raw)


def words() -> Any:
    """Whole words between blanks, as the bundled models'."""
    raw = Tokenizer(models.WordLevel(unk_token="<unk>"))
    raw.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    raw.train_from_iterator([TEXT], trainers.WordLevelTrainer(special_tokens=SPECIAL))
    with_specials(raw, "<s> $A")
    return wrapped(raw)


class Bytes(PreTrainedTokenizer):
    """One token per byte, in Python alone, as ByT5's: it tells no offsets."""

    def __init__(self, **settings: Any) -> None:
        special = {"pad_token": "<pad>", "eos_token": "</s>", "unk_token": "<unk>", "bos_token": "<s>"}
        self._added_tokens_decoder = {
            number: AddedToken(token, special=True) for number, token in enumerate(special.values())
        }
        super().__init__(**special, **settings)

    @property
    def vocab_size(self) -> int:
        return 256

    def get_vocab(self) -> dict[str, int]:
        return {self.convert_ids_to_tokens(number): number for number in range(self.vocab_size + 4)}

    def _tokenize(self, text: str, **_: Any) -> list[str]:
        return [chr(byte) for byte in text.encode()]

    def _convert_token_to_id(self, token: str) -> int:
        return ord(token) + 4

    def _convert_id_to_token(self, index: int) -> str:
        return chr(index - 4)

    def convert_tokens_to_string(self, tokens: list[str]) -> str:
        return b"".join(bytes([ord(token)]) if len(token) == 1 else token.encode() for token in tokens).decode(
            errors="replace"
        )

    def build_inputs_with_special_tokens(self, ids: list[int], pair: list[int] | None = None) -> list[int]:
        return [*ids, *(pair or []), self.eos_token_id]


KINDS: dict[str, Callable[[], Any]] = {
    "bytes, GPT-2": byte_level,
    "bytes, Llama 3": lambda: byte_level("<s> $A", BREAKS_JOIN),
    "bytes, a blank before every text": lambda: byte_level(prefix_space=True),
    "bytes, ends texts": lambda: byte_level("<s> $A </s>"),
    "SentencePiece, Llama 2": sentencepiece,
    "SentencePiece, ends texts": lambda: sentencepiece("<s> $A </s>"),
    "Metaspace, first": lambda: metaspace("first"),
    "Metaspace, always": lambda: metaspace("always"),
    "Unigram": unigram,
    "WordPiece": word_pieces,
    "words": words,
    "bytes in Python": Bytes,
}
