"""A loaded model as an ordinary folder of transformers: weights, configuration, tokenizer and chat template."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from copy import deepcopy
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from safetensors import SafetensorError

from kvsearch.core.errors import EnvironmentFault
from kvsearch.core.files import TEMPORARY
from kvsearch.core.parsing import describe_fault
from kvsearch.models.loading import LoadedModel


def make_saved_config(model: Any) -> dict[str, Any]:
    """Return what `save_pretrained` writes into the `config.json` of a model of transformers."""
    config = deepcopy(model.config)
    config.dtype = model.dtype
    config.architectures = [type(model).__name__]
    content: dict[str, Any] = json.loads(config.to_json_string())
    return content


@contextmanager
def save_files(loaded: LoadedModel, folder: Path) -> Iterator[list[Path]]:
    """Yield the files of a model, in the dtype that it was loaded in; what is not moved on into `folder` goes again.

    Raises:
        EnvironmentFault: they cannot be written.
    """
    with TemporaryDirectory(dir=folder, prefix=TEMPORARY) as made:
        try:
            loaded.model.save_pretrained(made)
            loaded.tokenizer.bare.save_pretrained(made)
        except (OSError, SafetensorError) as error:
            raise EnvironmentFault(
                f"the model cannot be saved in {folder}: {describe_fault(error)}: free some space or choose another "
                "folder, then give the same command again"
            ) from error
        yield sorted(Path(made).iterdir())
