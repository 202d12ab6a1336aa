"""Workers that have loaded the same model: what is done for many items alike is shared out, item by item.

Items are done in any order and handed out in theirs, so whoever sums over them gets the same bytes, however many
workers there are. A worker computes with as many threads as this process: their number may decide the last bits.
"""

from __future__ import annotations

import pickle
import traceback
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache, partial
from pathlib import Path
from typing import Any, NamedTuple, Self, TypeVar

from kvsearch.errors import EnvironmentFault, InternalError, KvsearchError, KvsearchWarning
from kvsearch.models.loading import LoadedModel, LoadOptions, Work, load
from kvsearch.models.memory import is_out_of_memory
from kvsearch.plan import ModelFingerprint
from kvsearch.workers.base import Outcome, OutcomeKind, shortened
from kvsearch.workers.cluster import RayWorkers
from kvsearch.workers.ray import RayExecutor, RayPool

AHEAD = 3  # items for each worker that are under way, or done and not yet handed out

Given = TypeVar("Given")
Made = TypeVar("Made")


@dataclass(frozen=True)
class ModelSource:
    """How a worker loads the model of a job, on one GPU where that is on GPUs, and how many threads it takes."""

    model: str
    options: LoadOptions
    fingerprint: ModelFingerprint
    threads: int

    @classmethod
    def of(cls, loaded: LoadedModel, options: LoadOptions) -> Self:
        """Return what a worker needs to load a model as this process has with `options`."""
        import torch

        name = str(Path(loaded.name).resolve()) if Path(loaded.name).exists() else loaded.name
        alone = replace(options, device=loaded.device.type, device_map=None)
        return cls(name, alone, loaded.fingerprint, torch.get_num_threads())

    def load(self) -> LoadedModel:
        """Load the model, or return it if this process has loaded it before.

        Raises:
            IncompatibleError: it is another one on this machine.
            KvsearchError: see `kvsearch.models.loading.load`.
        """
        import torch

        torch.set_num_threads(self.threads)
        loaded = _load(self.model, self.options)
        self.fingerprint.require(loaded.fingerprint, "this job")
        return loaded


_load = lru_cache(maxsize=1)(load)  # a worker goes from one part of a job to the next with the same model


class Item(NamedTuple):
    """One of the items that a work is done for, pickled: what comes from Ray's own store cannot be written to."""

    id: int
    given: bytes

    def require(self) -> None:
        """See `kvsearch.workers.base.Job`: any item will do."""

    def judged(self, values: object) -> tuple[OutcomeKind, str]:  # noqa: ARG002 - whatever a work makes
        """See `kvsearch.workers.base.Job`."""
        return "ok", ""


class Done(NamedTuple):
    """What a work has made of an item, pickled, and what it has warned of."""

    made: bytes
    warnings: list[str]


class ModelWork:
    """Does one work, which came pickled, for items, in a worker."""

    tokens_spent = 0  # nobody asks

    def __init__(self, source: ModelSource, work: bytes) -> None:
        self.loaded = source.load()
        self.work: Work[Any, Any] = pickle.loads(work)

    def evaluate(self, job: Item) -> Done:
        """Do the work for an item; InternalError for what is a bug, as its traceback does not leave the worker."""
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always", KvsearchWarning)
            try:
                made = self.work(self.loaded, pickle.loads(job.given))
                made = list(made) if isinstance(made, Iterator) else made
            except Exception as error:
                if isinstance(error, KvsearchError) or is_out_of_memory(error):
                    raise
                where = traceback.extract_tb(error.__traceback__)[-1]
                told = f"{error!r} in {where.name}, {where.filename}:{where.lineno}"
                raise InternalError(f"a bug in kvsearch, please report it ({shortened(told)})") from error
        doubts = [str(one.message) for one in caught if issubclass(one.category, KvsearchWarning)]
        return Done(pickle.dumps(made), doubts)

    def close(self) -> None:
        """The model stays: the next work may need it."""


class ModelWorkers:
    """The workers of a job on Ray; they start with the first work, and keep the model from one work to the next.

    Raises:
        UsageError, EnvironmentFault: see `RayPool`.
    """

    def __init__(self, loaded: LoadedModel, options: LoadOptions, wanted: RayWorkers) -> None:
        self.source = ModelSource.of(loaded, options)
        self.pool = RayPool(replace(wanted, gpus=1.0) if loaded.device.type == "cuda" else wanted)

    def map(self, work: Work[Given, Made], items: Sequence[Given]) -> Iterator[Made]:
        """Yield what `work` makes of each item, in their order.

        A worker that dies is replaced, and its item done again. What a work warns of is warned of here.

        Raises:
            KvsearchError: a work raised it, for any of the items.
            EnvironmentFault: no worker could be started, or two have died of one item.
            MemoryError: memory was too short for an item.
        """
        if not items:
            return
        pack = self.pool.ray.cloudpickle.dumps  # functions within functions, too
        factory: Any = partial(ModelWork, self.source, pack(work))
        found: dict[int, Made] = {}
        with RayExecutor[Item, Done](factory, self.pool, most=len(items), timed=False) as executor:
            asked = 0
            for number in range(len(items)):
                while number not in found:
                    while asked < min(len(items), number + AHEAD * max(executor.workers, 1)):
                        executor.submit(Item(asked, pack(items[asked])))
                        asked += 1
                    found.update((outcome.id, _made(outcome)) for outcome in executor.poll())
                yield found.pop(number)

    def close(self) -> None:
        """End the workers."""
        self.pool.close()


def _made(outcome: Outcome[Done]) -> Any:
    if outcome.values is None:
        raise MemoryError(outcome.message) if outcome.kind == "oom" else EnvironmentFault(outcome.message)
    for told in outcome.values.warnings:
        warnings.warn(told, KvsearchWarning, stacklevel=3)
    return pickle.loads(outcome.values.made)
