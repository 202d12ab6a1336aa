"""Tensor files: safetensors, written in one step, with a checksum that is compared when they are read.

Beside what a caller says of them, the metadata have the SHA-256 of the whole file, with zeros in the place of that
number.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
from collections.abc import Iterator, Mapping
from io import BufferedReader
from itertools import accumulate, pairwise
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from kvsearch.core.errors import UsageError
from kvsearch.core.files import open_file, write_atomically
from kvsearch.core.limits import MOST_HEADER
from kvsearch.core.parsing import parse_json

ABOUT_KEY = "kvsearch"
CHECKSUM_NAME = "sha256"
METADATA = "__metadata__"
FILE_DTYPES = {
    "F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16, "I64": torch.int64,
    "I32": torch.int32, "I16": torch.int16, "I8": torch.int8, "U8": torch.uint8, "BOOL": torch.bool,
}  # fmt: skip
DTYPE_FILE_NAMES = {dtype: name for name, dtype in FILE_DTYPES.items()}
UNKNOWN = "0" * 64
COPY_AGAIN = "copy it again from where it was written, or write it again"


def write_tensors(path: str | Path, tensors: Mapping[str, Tensor], about: str, overwrite: bool = False) -> int:
    """Write tensors and a text about them; return the size of the file in bytes. Errors as `write_atomically`."""
    order = sorted(tensors, key=lambda name: (-tensors[name].itemsize, name))  # each begins at a multiple of its items
    held = {name: tensors[name].detach().cpu().contiguous() for name in order}
    ends = [0, *accumulate(tensor.nbytes for tensor in held.values())]
    header: dict[str, Any] = {METADATA: {ABOUT_KEY: about, CHECKSUM_NAME: UNKNOWN}}
    for (name, tensor), offsets in zip(held.items(), pairwise(ends), strict=True):
        header[name] = {
            "dtype": DTYPE_FILE_NAMES[tensor.dtype],
            "shape": list(tensor.shape),
            "data_offsets": list(offsets),
        }
    # The checksum stands in the file that it is of: it is computed with zeros in its place, which are as long.
    unsigned = json.dumps(header, separators=(",", ":")).encode()
    # The format pads the header to eight bytes, so that tensors are aligned where the file is mapped.
    unsigned += b" " * (-len(unsigned) % 8)
    size = len(unsigned).to_bytes(8, "little")
    digest = hashlib.sha256(unsigned)
    for tensor in held.values():
        digest.update(_to_bytes(tensor))
    signed = unsigned.replace(_make_signature(UNKNOWN), _make_signature(digest.hexdigest()), 1)

    def pieces() -> Iterator[bytes | memoryview]:
        yield size + signed
        yield from map(_to_bytes, held.values())

    write_atomically(path, pieces(), overwrite)
    return 8 + len(signed) + ends[-1]


def read_tensors(path: str | Path) -> tuple[str, dict[str, Tensor]]:
    """Read what `write_tensors` wrote: the text, and the tensors, on the CPU.

    Raises:
        UsageError: there is no such file, or it is damaged or no file of kvsearch.
        EnvironmentFault: it cannot be read.
    """
    with open_file(path) as file:
        written, about, signature, entries = _format_header(file, path)
        if signature is None:  # of another kind, which whoever asked for it will say
            return about, {}
        digest = hashlib.sha256(written.replace(_make_signature(signature), _make_signature(UNKNOWN), 1))
        size = os.fstat(file.fileno()).st_size - file.tell()
        tensors: dict[str, Tensor] = {}
        end = 0
        try:
            for name, entry in entries.items():
                dtype = FILE_DTYPES[entry["dtype"]]
                begin = end
                start, end = entry["data_offsets"]
                length = math.prod(entry["shape"]) * dtype.itemsize
                if start != begin or end - start != length or not start <= end <= size:  # before memory is taken
                    raise ValueError("offsets do not fit")
                tensors[name] = torch.empty(entry["shape"], dtype=dtype)
                if end > start:
                    content = _to_bytes(tensors[name])
                    file.readinto(content)
                    digest.update(content)
        except (KeyError, TypeError, ValueError, RuntimeError) as error:
            raise UsageError(f"{path} is damaged, its header does not fit its content: {COPY_AGAIN}") from error
        if end != size or digest.hexdigest() != signature:
            raise UsageError(f"{path} is damaged, its content is not what was written: {COPY_AGAIN}")
    return about, tensors


def read_about(path: str | Path) -> str:
    """Read the text alone, without a look at the tensors. Errors as `read_tensors`."""
    with open_file(path) as file:
        return _format_header(file, path)[1]


def _format_header(file: BufferedReader, path: str | Path) -> tuple[bytes, str, str | None, dict[str, Any]]:
    """Return the header as it is written, the text in it, its checksum, and what it says of the tensors."""
    size = int.from_bytes(file.read(8), "little")
    if not 2 <= size <= min(MOST_HEADER, os.fstat(file.fileno()).st_size - 8):
        raise UsageError(f"{path} is no safetensors file, or not all of one: {COPY_AGAIN}")
    written = file.read(size)
    header = parse_json(written, f"the header of {path}")
    metadata = header.pop(METADATA, None) if isinstance(header, dict) else None
    if not isinstance(header, dict) or not isinstance(metadata, dict) or not isinstance(metadata.get(ABOUT_KEY), str):
        raise UsageError(f"{path} is a safetensors file without {ABOUT_KEY} metadata: it is not ours")
    signature = metadata.get(CHECKSUM_NAME)
    return written, metadata[ABOUT_KEY], signature if isinstance(signature, str) else None, header


def _to_bytes(tensor: Tensor) -> memoryview:
    if not tensor.numel():
        return memoryview(b"")
    data: memoryview = tensor.reshape(-1).view(torch.uint8).numpy().data
    return data


def _make_signature(digest: str) -> bytes:
    return f'"{CHECKSUM_NAME}":"{digest}"'.encode()
