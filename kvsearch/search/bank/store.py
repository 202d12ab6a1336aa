"""Where prefilled prompts are kept: on the device as far as a limit allows, else in host memory or on disk."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from tempfile import TemporaryDirectory

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from kvsearch.core.errors import EnvironmentFault
from kvsearch.core.parsing import describe_fault

Tensors = Mapping[str, Tensor]


class SampleStore:
    """Named groups of tensors, at most `limit` bytes of them where they were put.

    The rest goes to host memory if it comes from a GPU, else to files in a temporary folder, which are deleted when the
    store is closed.
    """

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self.nbytes = 0  # held where they were put
        self._held: dict[str, tuple[Tensors | Path, dict[str, torch.device]]] = {}  # with the devices they are of
        self._temporary: TemporaryDirectory[str] | None = None

    def put(self, name: str, tensors: Tensors) -> None:
        """Keep contiguous tensors under a name of their own; EnvironmentFault if a file cannot be written."""
        size = sum(tensor.nbytes for tensor in tensors.values())
        devices = {key: tensor.device for key, tensor in tensors.items()}
        if self.nbytes + size <= self.limit:
            self._held[name] = (dict(tensors), devices)
            self.nbytes += size
        else:
            self._held[name] = (self._moved(tensors), devices)

    def get(self, name: str, widths: Mapping[str, int]) -> dict[str, Tensor]:
        """Return tensors [H, N, ...] of a group, the first `widths` of N columns, on the devices they came from."""
        held, devices = self._held[name]
        if not isinstance(held, Path):
            return {key: held[key][:, :width].to(devices[key]) for key, width in widths.items()}
        with safe_open(held, framework="pt") as file:
            return {key: file.get_slice(key)[:, :width].to(devices[key]) for key, width in widths.items()}

    def close(self) -> None:
        """Forget everything, files included."""
        self._held = {}
        self.nbytes = 0
        if self._temporary is not None:
            self._temporary.cleanup()
            self._temporary = None

    def _moved(self, tensors: Tensors) -> Tensors | Path:
        host = {key: tensor.cpu() for key, tensor in tensors.items()}
        if any(tensor.is_cuda for tensor in tensors.values()):
            return host
        try:
            if self._temporary is None:
                self._temporary = TemporaryDirectory(prefix="kvsearch-bank-")
            path = Path(self._temporary.name) / f"sample-{len(self._held)}.safetensors"
            save_file(host, path)
        except (OSError, SafetensorError) as error:
            raise EnvironmentFault(
                f"cannot keep prompts in the temporary folder: {describe_fault(error)}; raise the memory limit, or "
                "free space"
            ) from error
        return path
