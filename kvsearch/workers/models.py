"""Workers with the same model loaded: a function of many items is shared out among them, item by item.

Items are done in any order and handed out in theirs, so whoever sums over them gets the same bytes, however many
workers there are. A worker computes with as many threads as this process: their number may decide the last bits.
"""

from __future__ import annotations

import pickle
import traceback
import warnings
from collections.abc import Iterator, Sequence
from contextlib import closing
from dataclasses import replace
from functools import lru_cache, partial
from pathlib import Path
from typing import Any

from kvsearch.core.errors import EnvironmentFault, InternalError, KvsearchError, KvsearchWarning
from kvsearch.core.parsing import shorten
from kvsearch.models.foreign import blame_checkpoint
from kvsearch.models.loading import Given, LoadedModel, LoadOptions, Made, Work, load
from kvsearch.models.memory import is_out_of_memory
from kvsearch.workers.base import Outcome
from kvsearch.workers.ray import RayExecutor, RayPool


class ModelSource:
    """How a worker loads the model that this process has with `options`, and how many threads it takes.

    The model is on one GPU where it is on GPUs.
    """

    def __init__(self, loaded: LoadedModel, options: LoadOptions) -> None:
        import torch

        self.model = str(Path(loaded.name).resolve()) if Path(loaded.name).exists() else loaded.name
        self.options = replace(options, device=loaded.device.type, device_map=None)
        self.fingerprint = loaded.fingerprint
        self.threads = torch.get_num_threads()

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


class ModelWork:
    """Applies one pickled function to items, in a worker; an `Evaluator`."""

    tokens_spent = 0  # nobody asks

    def __init__(self, source: ModelSource, work: bytes) -> None:
        self.loaded = source.load()
        self.work: Work[Any, Any] = pickle.loads(work)

    def evaluate(self, job: Any) -> tuple[Any, list[str]]:
        """Return what the work makes of an item, and its warnings.

        Raises:
            InternalError: a bug, with its place: its traceback does not leave the worker.
        """
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always", KvsearchWarning)
            try:
                with blame_checkpoint(self.loaded.name):
                    made = self.work(self.loaded, job)
                    made = list(made) if isinstance(made, Iterator) else made
            except Exception as error:
                if isinstance(error, KvsearchError) or is_out_of_memory(error):
                    raise
                where = traceback.extract_tb(error.__traceback__)[-1]
                place = f"{error!r} in {where.name}, {where.filename}:{where.lineno}"
                raise InternalError(f"a bug in kvsearch, please report it ({shorten(place)})") from error
        return made, [str(warning.message) for warning in caught if issubclass(warning.category, KvsearchWarning)]

    def close(self) -> None:
        """Keep the model: the next work may need it."""


class ModelWorkers:
    """The workers of a job on Ray; they start with the first work, and keep the model from one work to the next.

    Raises:
        UsageError, EnvironmentFault: see `RayPool`.
    """

    def __init__(self, loaded: LoadedModel, options: LoadOptions, workers: int, address: str | None) -> None:
        self.source = ModelSource(loaded, options)
        self.pool = RayPool(workers, address, gpus=1.0 if loaded.device.type == "cuda" else 0.0)

    def map(self, work: Work[Given, Made], items: Sequence[Given]) -> Iterator[Made]:
        """Yield what `work` makes of each item, in their order.

        A worker that dies is replaced, and its item done again. What a work warns of is warned of here.

        Raises:
            KvsearchError: a work raised it, for any of the items.
            EnvironmentFault: no worker could be started, or two have died of one item.
            MemoryError: memory was too short for an item.
        """
        pack = self.pool.ray.cloudpickle.dumps  # functions within functions, too
        executor: RayExecutor[Given, Any] = RayExecutor(partial(ModelWork, self.source, pack(work)), self.pool)
        results: dict[int, Made] = {}
        with closing(executor.run(items)) as outcomes:  # type: ignore[type-var]
            for number in range(len(items)):
                # Results come in any order and leave in that of the items, so sums have the same bits.
                while number not in results:
                    place, outcome = next(outcomes)
                    results[place] = result_of(outcome)
                yield results.pop(number)

    def close(self) -> None:
        """End the workers."""
        self.pool.close()


def result_of(outcome: Outcome[tuple[Any, list[str]]]) -> Any:
    """Return the result of a `ModelWork`, and repeat its warnings; raises an error if there is no result."""
    if outcome.values is None:
        raise MemoryError(outcome.message) if outcome.kind == "oom" else EnvironmentFault(outcome.message)
    made, messages = outcome.values
    for message in messages:
        warnings.warn(message, KvsearchWarning, stacklevel=3)
    return made
