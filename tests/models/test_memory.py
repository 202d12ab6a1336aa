"""Memory: what is used by default, and what counts as having run out of it."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import pytest
import torch
import transformers

from kvsearch import attach
from kvsearch.core import resources
from kvsearch.core.errors import EnvironmentFault
from kvsearch.core.resources import find_resource
from kvsearch.models.fingerprint import compute_fingerprint
from kvsearch.models.loading import LoadOptions, load
from kvsearch.models.memory import is_out_of_memory
from kvsearch.policies import create_policy
from kvsearch.runtime import Program
from tests.families import build


@pytest.mark.parametrize(
    ("error", "expected"),
    [
        (torch.OutOfMemoryError("CUDA out of memory."), True),
        (RuntimeError("DefaultCPUAllocator: not enough memory: you tried to allocate 8 bytes"), True),
        (RuntimeError("CUBLAS_STATUS_ALLOC_FAILED when calling cublasCreate"), True),
        (MemoryError(), True),
        (RuntimeError("shape mismatch"), False),
    ],
)
def test_what_counts_as_out_of_memory(error: Exception, expected: bool) -> None:
    assert is_out_of_memory(error) == expected


def test_what_a_device_map_leaves_out_is_told(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """The machine has room for less than the bundled model; what does not fit goes to the disk."""
    whole = transformers.AutoModelForCausalLM.from_pretrained
    small = partial(whole, max_memory={"cpu": "1MB"}, offload_folder=str(tmp_path))
    monkeypatch.setattr(transformers.AutoModelForCausalLM, "from_pretrained", small)
    with pytest.raises(EnvironmentFault) as caught:
        load("bundled", LoadOptions(device_map="auto"))
    words = str(caught.value)
    assert words.startswith("model 'bundled' does not fit: 0.7 of its 1.3 MB of weights were left outside of the ")
    assert "free 0.7 MB there" in words


@pytest.mark.parametrize("where", ["cpu", "disk"])
def test_models_that_others_have_spread(where: str, tmp_path: Path) -> None:
    import accelerate

    model = build("llama")
    program = Program.uniform(model, create_policy("criticalkv", {"window": 2}), lambda _: 8)
    if where == "cpu":
        accelerate.cpu_offload(model, execution_device=torch.device("cpu"))
    else:
        accelerate.disk_offload(model, tmp_path, execution_device=torch.device("cpu"))
    for use in (lambda: compute_fingerprint(model, "mine"), lambda: attach(model, program)):
        with pytest.raises(EnvironmentFault, match=r"does not fit: (\d+\.\d) of its \1 MB of weights"):
            use()


def test_a_model_that_fits_is_the_same_however_it_is_placed() -> None:
    assert load("bundled", LoadOptions(device_map="auto")).fingerprint == load("bundled").fingerprint


def test_where_they_are_looked_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Inside the package first, as a wheel has them, then beside it."""
    package = tmp_path / "kvsearch"
    monkeypatch.setattr(resources, "_PACKAGE", package)
    beside, inside = tmp_path / "data" / "x.json", package / "_resources" / "data" / "x.json"
    with pytest.raises(EnvironmentFault, match=r"data/x\.json is missing from this installation of kvsearch"):
        find_resource("data/x.json")
    for path in (beside, inside):
        path.parent.mkdir(parents=True)
        path.write_text("{}")
        assert find_resource("data/x.json") == path
