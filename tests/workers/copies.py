"""Workers without processes: what is sent is pickled as Ray does it, and items are done in another order."""

from __future__ import annotations

import pickle
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from io import BytesIO
from types import SimpleNamespace
from typing import Any

from torch import nn

from kvsearch.models.loading import LoadedModel
from kvsearch.workers.base import attempt
from kvsearch.workers.models import ModelWork, result_of
from kvsearch.workers.ray import import_ray


@dataclass
class Copies:
    """Two workers that share the model; `sent` are the bytes of every work, `items` counts those of every work."""

    loaded: LoadedModel
    sent: list[int] = field(default_factory=list)
    items: list[int] = field(default_factory=list)

    def map(self, work: Any, items: Sequence[Any]) -> Iterator[Any]:
        """The last item first, every other one by another worker."""
        packed = packed_of(work)
        self.sent.append(len(packed))
        self.items.append(len(items))
        source: Any = SimpleNamespace(load=lambda: self.loaded)
        workers = [ModelWork(source, packed) for _ in range(2)]
        found = {
            number: attempt(workers[number % 2], pickle.loads(packed_of(items[number])))
            for number in reversed(range(len(items)))
        }
        yield from (result_of(pickle.loads(pickle.dumps(found[number]))) for number in range(len(items)))


def packed_of(thing: Any) -> bytes:
    """Pickle as Ray does; a part of a model, or a tokenizer among many items, must not be in it."""
    cloudpickle = import_ray().cloudpickle

    class Pickler(cloudpickle.CloudPickler):  # type: ignore[misc, name-defined]
        def reducer_override(self, found: Any) -> Any:
            assert not isinstance(found, nn.Module), "weights are sent to workers"
            return super().reducer_override(found)

    with BytesIO() as file:
        Pickler(file).dump(thing)
        return file.getvalue()


def shared(loaded: LoadedModel) -> tuple[LoadedModel, Copies]:
    """The same model with workers."""
    copies = Copies(replace(loaded, workers=None))
    return replace(loaded, workers=copies), copies
