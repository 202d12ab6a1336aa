"""Samples: what is compressed, what follows, which are the same; where their entries are kept."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from kvsearch.core.errors import EnvironmentFault
from kvsearch.models.loading import LoadedModel
from kvsearch.search.bank import prepared as bank_store
from kvsearch.search.bank.prepared import SampleStore
from kvsearch.search.bank.samples import BankSample, list_samples
from kvsearch.tasks.base import Example, Query
from kvsearch.tasks.encode import encode_tasks, hash_tokens
from tests import tiny
from tests.families import DEVICES
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


SIZE = 2 * 6 * 4 * 4 + 2 * 6 * 3 * 2  # of `tensors`


def tensors(seed: int, device: str = "cpu") -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    made = {
        "keys.0": torch.randn(2, 6, 4, generator=generator),
        "values.0": torch.randn(2, 6, 3, generator=generator).bfloat16(),
    }
    return {name: tensor.to(device) for name, tensor in made.items()}


def same(store: SampleStore, name: str, expected: dict[str, Tensor]) -> bool:
    """Whether the first columns come back, as many as are asked for, and where they were."""
    found = store.get(name, {"keys.0": 4, "values.0": 100})
    wanted = {"keys.0": expected["keys.0"][:, :4], "values.0": expected["values.0"]}
    return all(torch.equal(found[key], wanted[key]) and found[key].device == wanted[key].device for key in wanted)


@pytest.fixture(autouse=True)
def temporary(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where temporary folders are."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    return tmp_path


@pytest.mark.parametrize("device", DEVICES)
def test_what_does_not_fit_comes_back(device: str, temporary: Path) -> None:
    """To host memory from a GPU, else to a temporary folder, which goes when the store is closed."""
    stores = [SampleStore(2 * SIZE), SampleStore(0)]
    for store in stores:
        for seed in range(4):
            store.put(str(seed), tensors(seed, device))
    assert [store.nbytes for store in stores] == [2 * SIZE, 0]
    for store in stores:
        assert all(same(store, str(seed), tensors(seed, device)) for seed in range(4))
        store.close()
        store.close()
        assert len(list(temporary.iterdir())) == (1 if store is stores[0] and device == "cpu" else 0)


def test_a_full_disk(temporary: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(bank_store, "save_file", full)
    store = SampleStore(0)
    with pytest.raises(
        EnvironmentFault, match=r"cannot keep prompts .*No space left on device; raise the memory limit"
    ):
        store.put("a", tensors(0))
    store.close()
    assert list(temporary.iterdir()) == []
