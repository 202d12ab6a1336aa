"""Load GGUF files as models: transformers reads them, with weights made dense."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
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
def hide_progress() -> Iterator[None]:
    """Keep the progress bar of the conversion off the screen: unlike others of transformers it has no switch."""
    from transformers import modeling_gguf_pytorch_utils as conversion

    shown = conversion.tqdm
    conversion.tqdm = partial(shown, disable=True)
    try:
        yield
    finally:
        conversion.tqdm = shown
