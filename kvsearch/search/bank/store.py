"""Where prefilled prompts are kept: on the device as far as a limit allows, else in host memory or on disk."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from kvsearch.errors import EnvironmentFault, UsageError

Tensors = Mapping[str, Tensor]


@dataclass(frozen=True, eq=False)
class _Spilled:
    """Tensors of which a copy is elsewhere, with the device that each belongs to."""

    devices: dict[str, torch.device]
    held: Tensors | Path


class SampleStore:
    """Named groups of tensors, at most `limit` bytes of them where they were put.

    The rest goes to files in `folder`, which are deleted when the store is closed. Without a folder it goes to host
    memory if it comes from a GPU, else to a temporary folder.

    Raises:
        UsageError: there is no such folder.
    """

    def __init__(self, limit: int, folder: Path | None = None) -> None:
        if folder is not None and not folder.is_dir():
            raise UsageError(f"there is no folder {folder} to keep samples in: create it first")
        self.limit, self.folder = limit, folder
        self.nbytes = 0  # held where they were put
        self.spilled = 0  # bytes held elsewhere
        self.closed = False
        self._held: dict[str, Tensors] = {}
        self._elsewhere: dict[str, _Spilled] = {}
        self._temporary: TemporaryDirectory[str] | None = None

    def put(self, name: str, tensors: Tensors) -> None:
        """Keep contiguous tensors under a name of their own; EnvironmentFault if a file cannot be written."""
        size = sum(tensor.nbytes for tensor in tensors.values())
        if self.nbytes + size <= self.limit:
            self._held[name] = dict(tensors)
            self.nbytes += size
            return
        devices = {key: tensor.device for key, tensor in tensors.items()}
        self._elsewhere[name] = _Spilled(devices, self._moved(tensors))
        self.spilled += size

    def get(self, name: str, widths: Mapping[str, int]) -> dict[str, Tensor]:
        """Return tensors [H, N, ...] of a group, the first `widths` of N columns, on the devices they came from."""
        if self.closed:
            raise UsageError("the samples of this bank were freed when it was closed: make a new one")
        if name in self._held:
            return {key: self._held[name][key][:, :width] for key, width in widths.items()}
        there = self._elsewhere[name]
        if not isinstance(there.held, Path):
            return {key: there.held[key][:, :width].to(there.devices[key]) for key, width in widths.items()}
        try:
            with safe_open(there.held, framework="pt") as file:
                return {key: file.get_slice(key)[:, :width].to(there.devices[key]) for key, width in widths.items()}
        except (OSError, SafetensorError) as error:
            raise _fault(f"cannot read {there.held} back", error) from error

    def close(self) -> None:
        """Forget everything, files included."""
        self.closed = True
        self._held, self._elsewhere = {}, {}
        self.nbytes = self.spilled = 0
        if self._temporary is not None:
            self._temporary.cleanup()
            self._temporary = None

    def _moved(self, tensors: Tensors) -> Tensors | Path:
        host = {key: tensor.cpu() for key, tensor in tensors.items()}
        if self.folder is None and any(tensor.is_cuda for tensor in tensors.values()):
            return host
        path = self._place() / f"sample-{len(self._elsewhere)}.safetensors"
        try:
            save_file(host, path)
        except (OSError, SafetensorError) as error:
            raise _fault(f"cannot write {path}", error) from error
        return path

    def _place(self) -> Path:
        """Return a folder of the store's own, so that several stores may share `folder`."""
        if self._temporary is None:
            try:
                self._temporary = TemporaryDirectory(prefix="kvsearch-bank-", dir=self.folder)
            except OSError as error:
                raise _fault(f"cannot create a folder in {self.folder or 'the temporary folder'}", error) from error
        return Path(self._temporary.name)


def _fault(what: str, error: Exception) -> EnvironmentFault:
    reason = " ".join(str(error).split())
    return EnvironmentFault(f"{what}: {reason}; raise the memory limit, or free space or name another folder")
