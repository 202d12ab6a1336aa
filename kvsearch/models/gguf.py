"""Load GGUF files as models: transformers reads them, with weights made dense."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache, partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from kvsearch.core.errors import EnvironmentFault, IncompatibleError

GGUF_SUFFIX = ".gguf"
_MAGIC = b"GGUF"
_SPLIT = re.compile(r"-(\d{5})-of-(\d{5})\.gguf$")


def is_gguf(source: str | Path) -> bool:
    """Tell whether a model is a GGUF file here, by its name."""
    path = Path(source)
    return path.suffix.lower() == GGUF_SUFFIX and path.is_file()


def check_gguf(path: Path) -> None:
    """Refuse a file that is no GGUF file, or one part of several, before anything that computes is imported.

    Raises:
        IncompatibleError: it is one of these.
        EnvironmentFault: the package gguf, which transformers reads such files with, is not installed.
    """
    with path.open("rb") as file:
        if file.read(len(_MAGIC)) != _MAGIC:
            raise IncompatibleError(f"{path} is no GGUF file, though its name says so: fetch it again")
    if (part := _SPLIT.search(path.name)) is not None:
        raise IncompatibleError(
            f"{path} is part {int(part[1])} of {int(part[2])}, and transformers reads whole files: join them with "
            "`llama-gguf-split --merge`"
        )
    if find_spec("gguf") is None:
        raise EnvironmentFault(f"{path} is read with the package gguf, which is not installed: pip install gguf")


def make_loading_arguments(path: Path) -> dict[str, Any]:
    """Return the arguments with which transformers loads the model of a file with dense weights."""
    import transformers

    config = getattr(transformers, "GgufConfig", None)  # releases without it always make weights dense
    return {"quantization_config": config(gguf_file=path.name, dequantize=True)} if config is not None else {}


def make_ordinary(model: Any) -> None:
    """Remove the marks of a GGUF file from a model with dense weights, so that it can be saved like any other."""
    for mark in ("hf_quantizer", "is_quantized", "quantization_method"):
        if mark in vars(model):
            delattr(model, mark)
    if hasattr(model.config, "quantization_config"):
        del model.config.quantization_config


@contextmanager
def read_once() -> Iterator[None]:
    """Let transformers read the header of a file once and without a progress bar, which has no switch.

    It parses the header for the configuration, for the tokenizer and for the weights, token by token of the vocabulary,
    and makes the table of tensor names anew for every module. That once took two minutes of a vocabulary of 262,144.
    """
    from unittest.mock import patch

    import gguf
    import numpy as np
    from transformers import modeling_gguf_pytorch_utils as conversion

    class Reader(gguf.GGUFReader):  # type: ignore[misc]
        data: Any

        def _build_fields(self, offset: int, count: int) -> int:
            self.data = self.data.view(np.ndarray)  # of a memory map a slice takes many times as long
            fields_end: int = super()._build_fields(offset, count)
            return fields_end

    with (
        patch.object(gguf, "GGUFReader", cache(Reader)),
        patch.object(gguf, "get_tensor_name_map", cache(gguf.get_tensor_name_map)),
        patch.object(conversion, "tqdm", partial(conversion.tqdm, disable=True)),
    ):
        yield
