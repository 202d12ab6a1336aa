"""Load the model of a job: take the caller's, or load one by name, with worker processes if wanted."""

from __future__ import annotations

from contextlib import ExitStack
from dataclasses import replace

from kvsearch.commands.reporter import NullReporter, Reporter
from kvsearch.models import loading
from kvsearch.models.loading import LoadedModel, LoadOptions


class ModelLoader:
    """Loads the model of a job when it is first needed, and ends its workers with the job.

    A job checks all it can before it loads anything, so it gets a loader and not a model.

    Args:
        reporter: who hears that a model is loaded; None: nobody.
        options: how it is loaded.
        given: a model that the caller has loaded; every `load` returns it, whatever the name.
        workers: number of Ray workers that load it, too, and share the work; None: this process does all.
        ray_address: a running Ray cluster; None: one is started here.
    """

    def __init__(
        self,
        reporter: Reporter | None = None,
        options: LoadOptions | None = None,
        given: LoadedModel | None = None,
        workers: int | None = None,
        ray_address: str | None = None,
    ) -> None:
        self.reporter = reporter or NullReporter()
        self.options = options or LoadOptions()
        self.given = given
        self.workers = workers
        self.ray_address = ray_address
        self._pools = ExitStack()  # of each `load`: a job may call it more than once

    def check(self, name: str) -> None:
        """Raise an error for an unknown model or device, without heavy imports; see `load`."""
        if self.given is None:
            loading.find_source(name, self.options)
            loading.check_device(self.options.device)

    def load(self, name: str, dtype: str | None = None, revision: str | None = None) -> LoadedModel:
        """Load a model by name, in another dtype or revision if these are given.

        Raises:
            UsageError, IncompatibleError: see `kvsearch.models.loading.load`.
            EnvironmentFault: the model cannot be loaded here, Ray is missing, or its cluster does not answer or has no
                room for the workers.
        """
        if self.given is not None:
            return self.given
        if self.workers is not None:
            from kvsearch.workers.ray import import_ray

            import_ray()  # missing, it is told before a model is loaded
        options = replace(self.options, dtype=dtype or self.options.dtype, revision=revision or self.options.revision)
        with self.reporter.loading(name):
            loaded = loading.load(name, options)
        if loaded.remark:
            self.reporter.say(loaded.remark)
        if self.workers is None:
            return loaded
        from kvsearch.workers.models import ModelWorkers

        pool = ModelWorkers(loaded, options, self.workers, self.ray_address)
        self._pools.callback(pool.close)
        return replace(loaded, workers=pool)

    def load_shape(self, name: str) -> LoadedModel:
        """Load configuration and tokenizer of a model, without weights; errors as `load`."""
        return self.given or loading.load(name, self.options, weights=False)

    def close(self) -> None:
        """End the workers."""
        self._pools.close()
