"""The directory of a model, which transformers reads: its configuration, weights and tokenizer."""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache, partial
from pathlib import Path
from tempfile import TemporaryDirectory

from transformers.utils import logging

from kvsearch.core.errors import EnvironmentFault
from kvsearch.models.loading import LoadOptions, load
from kvsearch.models.memory import is_out_of_memory
from tests import tiny
from tests.robustness.forms import Json, Safetensors
from tests.robustness.kinds.kind import Kind


def _model(path: Path) -> None:
    """Load it as commands do, with its weights and without; that memory runs out is told as they do."""
    logging.set_verbosity(logging.CRITICAL)
    logging.disable_progress_bar()
    for weights in (False, True):
        try:
            found = load(str(path.parent), LoadOptions(device="cpu"), weights=weights)
        except Exception as error:
            if is_out_of_memory(error):
                raise EnvironmentFault(f"{path.parent}: memory ran out") from error
            raise
        assert found.fingerprint.layers >= 1


def kinds() -> Iterator[Kind]:
    """Return these kinds."""
    for name in ("config.json", "tokenizer.json", "tokenizer_config.json", "generation_config.json"):
        what = name.removesuffix(".json").replace("_", "-")
        yield Kind(f"model-{what}", name, partial(files, name), Json(), _model, folder)
    weights = "model.safetensors"
    yield Kind("model-weights", weights, partial(files, weights), Safetensors(None), _model, folder)


@cache
def folder() -> dict[str, bytes]:
    """Return the files of the directory."""
    made = tiny.loaded("llama", num_hidden_layers=2)
    with TemporaryDirectory() as place:
        made.model.save_pretrained(place)
        made.tokenizer.save_pretrained(place)
        return {path.name: path.read_bytes() for path in Path(place).iterdir()}


def files(name: str) -> list[bytes]:
    """Return the file of this name."""
    return [folder()[name]]
