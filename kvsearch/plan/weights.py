"""Weights that plans and profiles name by their SHA-256: files of fitted rankings, beside the files that name them.

A policy with weights has a parameter `weights`, the SHA-256 of a safetensors file. The file lies beside the plan under
a name that begins with the policy's (`probe-0123456789ab.safetensors`), so that a folder can be moved as a whole.
Reading a plan or profile makes its weights known to this process, writing one puts them beside it.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterable
from pathlib import Path

from kvsearch.errors import UsageError
from kvsearch.plan.files import atomic_write, read_bytes
from kvsearch.plan.schema import PolicySpec

WEIGHTS = "weights"  # the parameter
_NAME = re.compile(r"\w+-[0-9a-f]{12}\.safetensors")
_known: dict[str, tuple[Path, bytes]] = {}  # by SHA-256: where they were read, and what they are


def know(data: bytes, path: Path) -> str:
    """Make weights known to this process, and return their SHA-256."""
    digest = hashlib.sha256(data).hexdigest()
    _known.setdefault(digest, (path, data))
    return digest


def known_weights(digest: str) -> tuple[Path, bytes]:
    """Return where weights were read and their bytes; UsageError if no file with them was."""
    if digest not in _known:
        raise UsageError(
            f"the weights {digest[:12]}... are not here: they lie in a file beside the plan or profile that names them"
        )
    return _known[digest]


def weights_file(spec: PolicySpec, beside: str | Path) -> Path | None:
    """Return where the weights of a policy lie beside a file; None if it has none."""
    digest = spec.params.get(WEIGHTS)
    return Path(beside).parent / f"{spec.name}-{digest[:12]}.safetensors" if isinstance(digest, str) else None


def is_weights(name: str) -> bool:
    """Tell whether a file has a name as `weights_file` gives."""
    return _NAME.fullmatch(name) is not None


def find_weights(specs: Iterable[PolicySpec], beside: str | Path) -> None:
    """Make the weights known that a file's policies name.

    Raises:
        UsageError: they are not beside it, and unknown to this process, or they are others than it names.
        EnvironmentFault: they cannot be read.
    """
    for spec, path in _with_weights(specs, beside):
        wanted = str(spec.params[WEIGHTS])
        if wanted in _known:
            continue
        if not path.exists():
            raise UsageError(f"{beside} needs the weights {path.name} beside it: copy them from where it was written")
        data = read_bytes(path)
        if hashlib.sha256(data).hexdigest() != wanted:
            raise UsageError(f"{path} has other weights than {beside} names: copy both from where they were written")
        know(data, path)


def put_weights(specs: Iterable[PolicySpec], beside: str | Path) -> None:
    """Write the weights that a file's policies name beside it; raises as `known_weights` and `atomic_write`."""
    for spec, path in _with_weights(specs, beside):
        _, data = known_weights(str(spec.params[WEIGHTS]))
        if not path.exists() or path.read_bytes() != data:
            atomic_write(path, data)


def _with_weights(specs: Iterable[PolicySpec], beside: str | Path) -> list[tuple[PolicySpec, Path]]:
    places = [(spec, weights_file(spec, beside)) for spec in specs]
    return [(spec, path) for spec, path in places if path is not None]
