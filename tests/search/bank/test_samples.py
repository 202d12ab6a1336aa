"""Samples: what is compressed, what follows, and which are the same; a full disk."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

import pytest
import torch

from kvsearch.core.errors import EnvironmentFault
from kvsearch.models.loading import LoadedModel
from kvsearch.search.bank import prepared as bank_store
from kvsearch.search.bank.prepared import SampleStore
from kvsearch.search.bank.samples import BankSample, list_samples
from kvsearch.tasks.base import Example, Query
from kvsearch.tasks.encode import encode_tasks, hash_tokens
from tests import tiny
from tests.search.bank.cases import PROTOCOLS


def of_queries(model: LoadedModel, protocol: Any, *queries: Query, **changes: Any) -> list[BankSample]:
    context = " ".join(tiny.document(40).words[1:])
    task = tiny.Listed("asked", (Example("asked", "7", context, queries),), **changes)
    return list_samples(encode_tasks(model, [task], 1), protocol)


def words(model: LoadedModel, ids: torch.Tensor) -> str:
    return model.tokenizer.decode(ids.tolist())


def test_question_agnostic_the_question_follows_as_far_as_a_reply_may_go(model: LoadedModel) -> None:
    query = Query("? code", ("mark recall .", "code"), max_new_tokens=2, prefix=" =")
    (sample,) = of_queries(model, "question-agnostic", query)
    assert words(model, sample.question_ids) == "? code ="
    assert words(model, sample.answer) == "mark recall"  # the first one counts
    assert words(model, sample.following) == "? code = mark"
    assert (sample.predicting, sample.limit) == (2, 2)
    assert words(model, sample.prompt).startswith("<bos>")
    assert "?" not in words(model, sample.prompt)


@pytest.mark.parametrize(("answer", "following", "predicting"), [("mark recall .", "mark recall", 2), ("mark", "", 0)])
def test_question_aware_the_prompt_predicts_the_first_token(
    answer: str, following: str, predicting: int, model: LoadedModel
) -> None:
    (sample,) = of_queries(model, "question-aware", Query("? code", (answer,)))
    assert len(sample.question_ids) == 0
    assert words(model, sample.prompt).endswith("? code")
    assert words(model, sample.following) == following
    assert sample.predicting == predicting


def test_hashes_say_what_samples_share(model: LoadedModel) -> None:
    queries = Query("? code", ("mark",)), Query("? item", ("mark",))
    agnostic, aware = (of_queries(model, protocol, *queries) for protocol in PROTOCOLS)
    one, two = agnostic
    assert one.prompt_sha256 == two.prompt_sha256 == hash_tokens(one.prompt)
    assert one.sha256 != two.sha256
    assert [sample.sha256 for sample in aware] == [sample.sha256 for sample in agnostic]
    assert aware[0].prompt_sha256 == aware[0].sha256 != aware[1].prompt_sha256


@pytest.fixture(autouse=True)
def temporary(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where temporary folders are."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    return tmp_path


def test_a_full_disk(temporary: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(bank_store, "save_file", full)
    store = SampleStore(0)
    with pytest.raises(
        EnvironmentFault, match=r"cannot keep prompts .*No space left on device; raise the memory limit"
    ):
        store.put("a", {"keys.0": torch.zeros(2, 6, 4)})
    store.close()
    assert list(temporary.iterdir()) == []
