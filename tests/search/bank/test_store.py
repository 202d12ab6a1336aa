"""What does not fit goes elsewhere and comes back the same."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from kvsearch.errors import EnvironmentFault, UsageError
from kvsearch.search.bank import store as bank_store
from kvsearch.search.bank.store import SampleStore
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


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("named", [True, False])
def test_what_does_not_fit_comes_back(device: str, named: bool, tmp_path: Path) -> None:
    """To a folder, or without one to host memory from a GPU, else to a temporary folder."""
    store = SampleStore(2 * SIZE, tmp_path if named else None)
    for seed in range(4):
        store.put(str(seed), tensors(seed, device))
    assert (store.nbytes, store.spilled) == (2 * SIZE, 2 * SIZE)
    assert all(same(store, str(seed), tensors(seed, device)) for seed in range(4))
    assert len(list(tmp_path.glob("*/*.safetensors"))) == 2 * named


def test_what_fits_is_no_copy() -> None:
    store, mine = SampleStore(SIZE), tensors(0)
    store.put("mine", mine)
    assert store.get("mine", {"keys.0": 2})["keys.0"].data_ptr() == mine["keys.0"].data_ptr()


def test_something_small_still_fits_after_something_large(tmp_path: Path) -> None:
    store = SampleStore(SIZE, tmp_path)
    store.put("large", {"keys.0": torch.zeros(2, 60, 4)})
    store.put("small", tensors(0))
    assert (store.nbytes, store.spilled) == (SIZE, 2 * 60 * 4 * 4)


def test_closing_deletes_the_files_and_nothing_else(tmp_path: Path) -> None:
    (tmp_path / "mine.txt").write_text("mine")
    first, second = SampleStore(0, tmp_path), SampleStore(0, tmp_path)
    first.put("a", tensors(0))
    second.put("a", tensors(1))
    first.close()
    assert same(second, "a", tensors(1))
    second.close()
    second.close()
    assert [path.name for path in tmp_path.iterdir()] == ["mine.txt"]
    assert (second.nbytes, second.spilled) == (0, 0)
    with pytest.raises(UsageError, match="freed when it was closed: make a new one"):
        second.get("a", {"keys.0": 1})


def test_a_missing_folder() -> None:
    with pytest.raises(UsageError, match="there is no folder /nowhere to keep samples in: create it first"):
        SampleStore(0, Path("/nowhere"))


def test_a_full_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(bank_store, "save_file", full)
    store = SampleStore(0, tmp_path)
    with pytest.raises(EnvironmentFault, match=r"cannot write .*No space left on device; raise the memory limit"):
        store.put("a", tensors(0))
    store.close()
    assert list(tmp_path.iterdir()) == []


def test_a_damaged_file(tmp_path: Path) -> None:
    store = SampleStore(0, tmp_path)
    store.put("a", tensors(0))
    for path in tmp_path.glob("*/*"):
        path.write_bytes(b"gone")
    with pytest.raises(EnvironmentFault, match=r"cannot read .* back"):
        store.get("a", {"keys.0": 1})
