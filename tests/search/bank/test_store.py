"""What does not fit goes elsewhere and comes back the same."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from kvsearch.core.errors import EnvironmentFault
from kvsearch.search.bank import prepared as bank_store
from kvsearch.search.bank.prepared import SampleStore
from tests.families import DEVICES

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
