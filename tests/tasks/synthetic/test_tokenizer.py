"""The bundled model and its tokenizer."""

from __future__ import annotations

from pathlib import Path

import pytest

from kvsearch.models.loading import LoadOptions, load
from kvsearch.runtime.decode.replies import stop_tokens
from kvsearch.runtime.program import full_cache
from kvsearch.tasks.synthetic.suite import SUITES, SyntheticTask
from kvsearch.tasks.synthetic.vocabulary import WORDS
from scripts.train_bundled import tokenizer
from tests.tiny import run


def test_words_are_tokens() -> None:
    words = tokenizer()
    assert len(words) == len(WORDS)
    assert words("the calm fox .\n\nin  barn")["input_ids"] == [1] + [
        WORDS.index(word) for word in "the calm fox . in barn".split()
    ]
    assert words.decode(words("the calm fox .")["input_ids"], skip_special_tokens=True) == "the calm fox ."


def test_unknown_words_and_special_tokens() -> None:
    words = tokenizer()
    assert words("the Fox", add_special_tokens=False)["input_ids"] == [WORDS.index("the"), words.unk_token_id]
    assert (words.pad_token_id, words.bos_token_id, words.eos_token_id, words.unk_token_id) == (0, 1, 2, 3)
    assert words.padding_side == "left"
    assert not words.chat_template


def test_it_survives_being_saved(tmp_path: Path) -> None:
    from transformers import AutoTokenizer

    tokenizer().save_pretrained(tmp_path)
    again = AutoTokenizer.from_pretrained(tmp_path)
    text = SyntheticTask("multikey", 512).examples(1, 0)[0].context
    assert again(text)["input_ids"] == tokenizer()(text)["input_ids"]
    assert again.padding_side == "left"


@pytest.mark.nightly
def test_the_shipped_model_answers() -> None:
    model = load("bundled", LoadOptions(device="cpu"))
    assert len(model.tokenizer) == len(WORDS) == model.model.config.vocab_size
    assert model.tokenizer("the calm fox .")["input_ids"] == tokenizer()("the calm fox .")["input_ids"]
    assert model.tokenizer.eos_token_id in stop_tokens(model)
    samples = run(model, {"full": full_cache(model.model)}, [SyntheticTask(name, 512) for name in SUITES["core"]], 2)
    scores = {task: [s.score for s in samples if s.task == task] for task in SUITES["core"]}
    assert all(sum(found) >= 0.75 * len(found) > 0 for found in scores.values()), scores
