"""Token counts without a download: words, a byte-level BPE trained on the shipped story, and the bundled tokenizer."""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path
from typing import Any

from kvsearch.core.resources import find_resource
from kvsearch.tasks.base import Example, TokenCount
from kvsearch.tasks.prompts import PLACE
from kvsearch.tasks.ruler import RULER_TASKS, RulerTask

GENERATED = [name for name in RULER_TASKS if not name.startswith("qa")]
STORY = "data/calibration/novel.txt"


def words(text: str) -> int:
    return len(text.split())


@cache
def bpe_tokenizer() -> Any:
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=3000, initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), show_progress=False
    )
    lists = [find_resource(f"data/ruler/{kind}.txt").read_text() for kind in ("nouns", "adjectives", "verbs")]
    tokenizer.train_from_iterator([find_resource(STORY).read_text(), *lists], trainer)
    return tokenizer


@cache
def bpe() -> TokenCount:
    return lambda text: len(bpe_tokenizer().encode(text).ids)


@cache
def bundled() -> TokenCount:
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(str(find_resource("data/bundled/tokenizer.json")))
    return lambda text: len(tokenizer.encode(text, add_special_tokens=False).ids)


def count_of(name: str) -> TokenCount:
    return {"words": lambda: words, "bpe": bpe, "bundled": bundled}[name]()


def whole(example: Example) -> str:
    """The whole prompt of an example, all turns included, where there is no chat template."""
    asked = (RulerTask.prompt.replace(PLACE, query.question) + query.prefix for query in example.queries)
    return example.context + "".join(asked)


def used(example: Example, count: TokenCount) -> int:
    """Tokens of the whole prompt and of the reply."""
    return count(whole(example)) + sum(query.max_new_tokens for query in example.queries)


def paragraph(number: int) -> str:
    return f"In the year {1000 + number} the town of Place{number} built a bridge." + " It stood for a long time." * 7


def squad(folder: Path, articles: int = 5, paragraphs: int = 8) -> Path:
    """A file in SQuAD's format; every paragraph has two questions, one of them without an answer."""
    data = []
    for article in range(articles):
        parts: list[dict[str, Any]] = []
        for place in range(paragraphs):
            number = article * paragraphs + place
            year = {"text": str(1000 + number), "answer_start": 12}
            parts.append(
                {
                    "context": paragraph(number),
                    "qas": [
                        {"id": "a", "question": f"When did Place{number} build?", "answers": [year, year]},
                        {"id": "b", "question": f"Why {number}?", "answers": [], "is_impossible": True},
                        {"id": "c", "question": f"How {number}?", "answers": []},
                    ],
                }
            )
        data.append({"title": f"Article {article}", "paragraphs": parts})
    return written(folder / "squad.json", {"version": "v2.0", "data": data})


def hotpot(folder: Path, questions: int = 12, each: int = 4) -> Path:
    """A file in HotpotQA's format: every question has `each` paragraphs of its own."""
    rows = [
        {
            "_id": str(number),
            "question": f"Which town built in {1000 + number * each}?",
            "answer": f"Place{number * each}",
            "supporting_facts": [],
            "context": [[f"Town {n}", [paragraph(n), " The end."]] for n in range(number * each, (number + 1) * each)],
        }
        for number in range(questions)
    ]
    return written(folder / "hotpot.json", rows)


def written(path: Path, data: object) -> Path:
    path.write_text(json.dumps(data))
    return path
