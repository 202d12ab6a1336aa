"""No split of the synthetic tasks shares a document with another one, or with what bundled models were trained on."""

from __future__ import annotations

import hashlib
import json
import random
from collections.abc import Iterable
from itertools import product
from typing import Any

import pytest

from kvsearch.core.resources import find_resource
from kvsearch.models.loading import BUNDLED
from kvsearch.tasks.synthetic.language import Document
from kvsearch.tasks.synthetic.suite import FORMS, SYNTHETIC_SPLITS, SyntheticTask
from scripts.bundled_calibration import calibration_file
from scripts.train_bundled import ASKED, CONTEXTS, TOKENS_PER_STEP, training_document

DOCUMENTS = 30
TRAINING_SEED = 0  # the default of the training script
PUBLISHED = {
    "single": "e9b72a656d655d93",
    "multikey": "056566d1f6d31930",
    "multiquery": "64c38c4f42ace00a",
    "multivalue": "52f8e09f6ab0dd9b",
    "chain": "011d1355488c52b5",
    "vote": "052c4ff925d2f263",
}


def digest(text: str) -> bytes:
    return hashlib.sha256(text.encode()).digest()


def hashes(task: str, split: str, length: int, seed: int, samples: int) -> list[bytes]:
    return [digest(example.context) for example in SyntheticTask(task, length, split).examples(samples, seed)]


def trained_on(length: int, seed: int) -> list[bytes]:
    rng = random.Random(seed)
    return [digest(" ".join(training_document(rng, length).words[1:])) for _ in range(DOCUMENTS)]


def assert_disjoint(streams: Iterable[list[bytes]]) -> None:
    found = [one for stream in streams for one in stream]
    assert len(set(found)) == len(found)


def test_splits_seeds_tasks_lengths_and_the_models_training_share_no_document() -> None:
    streams = [
        hashes(*stream, samples=3) for stream in product(FORMS, SYNTHETIC_SPLITS, (512, 520), (TRAINING_SEED, 1, -1))
    ]
    assert_disjoint([*streams, trained_on(512, TRAINING_SEED)])


def test_the_calibration_file_is_of_the_calibrate_split() -> None:
    contexts = {digest(context["text"]) for context in calibration_file()["contexts"]}
    streams = {
        split: {h for task in FORMS for h in hashes(task, split, 1024, 0, samples=2)} for split in SYNTHETIC_SPLITS
    }
    assert contexts <= streams["calibrate"]
    assert not any(contexts & streams[split] for split in SYNTHETIC_SPLITS if split != "calibrate")


def replayed(row: dict[str, Any], rng: random.Random) -> tuple[list[Document], list[Document]]:
    """What the model read in the 50 steps of a row of its training log, and the twelve documents it was scored on."""
    stage = CONTEXTS.index(row["stage"])
    read: list[Document] = []
    for _ in range(50):
        length = CONTEXTS[stage] if rng.random() < 0.7 else rng.choice(CONTEXTS[: stage + 1])
        read += (training_document(rng, length) for _ in range(max(4, TOKENS_PER_STEP // (length + 40))))
    return read, [training_document(rng, CONTEXTS[stage]) for _ in range(12)]


@pytest.mark.slow
@pytest.mark.nightly
@pytest.mark.parametrize("name", BUNDLED)
def test_the_bundled_models_never_read_a_document_of_the_suites(name: str) -> None:
    """Their whole training is drawn again; the tasks scored in each row of the log tell that it is the same stream."""
    rows = [json.loads(line) for line in (find_resource(f"data/{name}") / "training.jsonl").read_text().splitlines()]
    rng, known = random.Random(TRAINING_SEED), set[bytes]()
    for row in rows:
        if row["stage"] != "recall":
            read, scored = replayed(row, rng)
            asked = {ASKED[question.question.split()[1]] for document in scored for question in document.questions[:6]}
            assert asked == set(row) - {"seconds", "step", "loss", "stage"}, f"another stream at step {row['step']}"
            known |= {digest(" ".join(document.words[1:])) for document in (*read, *scored)}
    assert len(known) > 8 * rows[-1]["step"]
    for stream in product(FORMS, SYNTHETIC_SPLITS, (512, 1024), (0,)):
        assert known.isdisjoint(hashes(*stream, samples=50))


@pytest.mark.parametrize("task", PUBLISHED)
def test_documents_that_published_numbers_rest_on(task: str) -> None:
    state = hashlib.sha256()
    for length, split, seed in product((512, 1024, 2048), ("calibrate", "select", "report"), (0, 1)):
        for example in SyntheticTask(task, length, split).examples(3, seed):
            state.update(str((example.key, example.context)).encode())
            state.update(str([(query.question, query.answers) for query in example.queries]).encode())
    assert state.hexdigest()[:16] == PUBLISHED[task]
