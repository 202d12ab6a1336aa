"""The candidate bank: one dense prefill per prompt, then any number of candidates at the price of the answers alone.

Evicting a prompt changes nothing that the model computes for it, so one pass over it serves every candidate. Keys and
values are stored once, sorted by rank inside each head, and a candidate is how many of them each head keeps: budgets in
entries per kv head, int64 [L, Hkv], full-attention layers in ascending order. What follows the prompt, a teacher-forced
answer or a greedy reply, is computed for a whole population in one pass.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import TracebackType

import numpy as np
from torch import Tensor

from kvsearch.budgets.allocator import Ints
from kvsearch.errors import UsageError
from kvsearch.evaluation.replies import left_padded
from kvsearch.evaluation.runner import stop_tokens
from kvsearch.models.architecture import describe
from kvsearch.models.loading import LoadedModel
from kvsearch.models.memory import default_memory
from kvsearch.policies import Policy
from kvsearch.runtime import Program
from kvsearch.runtime.attention import running
from kvsearch.search.bank.checks import candidate_table, check_cap, check_objective, check_samples, sample_indices
from kvsearch.search.bank.memory import Sizes, Splitting, Work, blocks, check_fits
from kvsearch.search.bank.passes import Pass, Portion, Reply, side_by_side
from kvsearch.search.bank.prefill import base_policies, windows_of
from kvsearch.search.bank.prepared import PreparedSamples, Progress
from kvsearch.search.bank.samples import BankSample
from kvsearch.search.bank.store import SampleStore
from kvsearch.search.objectives import Floats, answer_kl, answer_nll, find_objective
from kvsearch.search.settings import ObjectiveName

Act = Callable[[Portion, list[int], slice], None]


class CandidateBank:
    """Losses, replies and scores of populations of candidates on samples whose prompts were read once.

    A context manager: leaving it frees what is held, files included.

    Results are data: a candidate under which the model emits NaN or infinity has losses or scores that are not finite,
    and no replies. They depend on which candidates are evaluated together by rounding only: on a CPU not at all unless
    a pass has just a few tokens, on a GPU in the last digits.

    Args:
        loaded: the model.
        base: what ranks the entries: a policy, one for each full-attention layer, or a program with a prefill phase.
        samples: of one protocol; see `bank_samples`.
        cap: the largest budget of any candidate, in entries per kv head.
        full: also note what the full cache says of every answer ("kl" compares with it, exactly: the log-probabilities
            of the whole vocabulary). Takes the full cache of one prompt at a time while prompts are read.
        max_memory: bytes for stored prompts and passes; the model itself, and the dense attention of the prompt that
            is being read, come on top. Default: 8 GiB, or half of what a GPU has free. At most half of it holds
            prompts; the others are spilled, see `SampleStore`.
        folder: where files go that are spilled to disk.
        progress: told (prompts read, prompts).

    Raises:
        UsageError: there are no samples, samples of two protocols, a policy without one order of its entries, or less
            memory than one sample and candidate take.
        IncompatibleError: a prompt is too long for the model, or makes it emit NaN.
        EnvironmentFault: a full disk.
    """

    def __init__(
        self,
        loaded: LoadedModel,
        base: Program | Policy | Mapping[int, Policy],
        samples: Sequence[BankSample],
        cap: int,
        *,
        full: bool = False,
        max_memory: int | None = None,
        folder: Path | None = None,
        progress: Progress | None = None,
    ) -> None:
        self.loaded, self.samples, self.cap, self.full = loaded, tuple(samples), cap, full
        policies, windows = base_policies(loaded.model, base), windows_of(loaded.model)
        self.shape = (len(policies), describe(loaded.model).kv_heads)
        check_samples(loaded.model, self.samples)
        check_cap(cap)
        self._sizes = Sizes(loaded.model, tuple(windows.values()))
        self._memory = default_memory(loaded.device) if max_memory is None else max_memory
        self._store = SampleStore(self._room(), folder)
        self._splitting = Splitting()
        self._spent = 0
        self._prepared = PreparedSamples(loaded.model, policies, windows, self.samples, cap, self._store, full)
        try:
            with running(loaded.model):
                self._prepared.read(progress)
        except BaseException:
            self.close()
            raise

    # --- what candidates are worth --------------------------------------------------------------------------------

    def values(
        self, objective: ObjectiveName, candidates: Sequence[Ints], samples: Sequence[int] | None = None
    ) -> Floats:
        """Every candidate on every sample by an objective, float64 [P, S]; see `losses` and `scores`."""
        if find_objective(objective).free_running:
            return self.scores(candidates, samples)
        return self.losses(candidates, samples, objective)

    def losses(
        self, candidates: Sequence[Ints], samples: Sequence[int] | None = None, objective: ObjectiveName = "nll"
    ) -> Floats:
        """Losses of teacher-forced answers, means over the tokens of each in nats, float64 [P, S].

        `candidates` are P tables [L, Hkv], `samples` indices into those of the bank (None: all). The first token of an
        answer that follows the prompt at once is predicted by the prompt itself: it has the same -log p under every
        candidate, and no divergence.

        Raises:
            UsageError: no such objective or sample, a sample without an answer, a candidate of another shape or above
                the cap, "kl" without `full`, too little memory.
            RuntimeError, MemoryError: torch or Python ran out of memory for a single candidate and sample.
        """
        table, chosen = self._table(candidates), self._chosen(samples)
        check_objective(find_objective(objective), [self.samples[index] for index in chosen], self.full)
        found = np.zeros((len(table), len(chosen)))

        def act(portion: Portion, places: list[int], some: slice) -> None:
            logits = Pass(self.loaded.model, portion, table[some]).forced()
            if logits is not None:
                loss = self._loss(objective, [chosen[place] for place in places])
                found[some, places] = np.stack([loss(one) for one in logits])

        works = [Work.forcing(self.samples[index], self.cap) for index in chosen]
        self._run(table, chosen, works, act)
        self._spent += len(table) * self.tokens(chosen)
        if objective == "nll":
            found += self._prepared.given[chosen]
        return self._per_token(found, chosen)

    def generate(
        self, candidates: Sequence[Ints], samples: Sequence[int] | None = None, max_new_tokens: int | None = None
    ) -> list[list[list[int] | None]]:
        """Greedy replies, token ids by candidate and sample; None where the model emits NaN or infinity.

        As long as each question allows, and at most `max_new_tokens`. Errors as for `losses`.
        """
        return [[reply.tokens for reply in row] for row in self._replies(candidates, samples, max_new_tokens)]

    def scores(self, candidates: Sequence[Ints], samples: Sequence[int] | None = None) -> Floats:
        """The task's metric of every reply, 0 to 1, float64 [P, S]; UsageError also if a reply cannot be judged."""
        replies = self._replies(candidates, samples, None)
        made = [
            [np.nan if reply.tokens is None else reply.sample.score(reply.tokens) for reply in row] for row in replies
        ]
        return np.array(made, dtype=np.float64).reshape(len(made), len(self._chosen(samples)))

    def full_losses(self, samples: Sequence[int] | None = None) -> Floats:
        """The "nll" of the full cache on each sample, float64 [S]; NaN where there is no answer, or without `full`."""
        chosen = self._chosen(samples)
        return self._per_token(self._prepared.full_nll[chosen], chosen)

    # --- what it costs --------------------------------------------------------------------------------------------

    def tokens(self, samples: Sequence[int] | None = None) -> int:
        """Tokens that the model reads for the losses of one candidate."""
        return sum(len(self.samples[index].following) for index in self._chosen(samples))

    @property
    def tokens_spent(self) -> int:
        """Tokens that the model has read so far: prompts, and what followed them under every candidate.

        Padding does not count, nor what had to be done again because memory ran out.
        """
        return self._prepared.tokens + self._spent

    @property
    def nbytes(self) -> int:
        """Bytes of prompts on the device."""
        return self._store.nbytes

    @property
    def spilled(self) -> int:
        """Bytes of prompts in host memory (of a GPU's) or on disk."""
        return self._store.spilled

    def close(self) -> None:
        """Free what is held; the bank cannot be used afterwards."""
        self._store.close()

    def __enter__(self) -> CandidateBank:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    # --- passes ---------------------------------------------------------------------------------------------------

    def _replies(
        self, candidates: Sequence[Ints], samples: Sequence[int] | None, max_new_tokens: int | None
    ) -> list[list[Reply]]:
        table, chosen = self._table(candidates), self._chosen(samples)
        if max_new_tokens is not None and max_new_tokens < 1:
            raise UsageError(f"a reply has at least 1 token, not {max_new_tokens}")
        limits = [min(self.samples[index].limit, max_new_tokens or sys.maxsize) for index in chosen]
        found: dict[tuple[int, int], Reply] = {}
        stop = stop_tokens(self.loaded)

        def act(portion: Portion, places: list[int], some: slice) -> None:
            first = self._prepared.last_logits([chosen[place] for place in places])
            reader = Pass(self.loaded.model, portion, table[some])
            replies = reader.replies(first, [limits[place] for place in places], stop)
            for candidate, row in enumerate(replies, some.start):
                found.update({(candidate, place): reply for place, reply in zip(places, row, strict=True)})

        works = [
            Work.replying(self.samples[index], self.cap, limit) for index, limit in zip(chosen, limits, strict=True)
        ]
        self._run(table, chosen, works, act)
        self._spent += sum(reply.read for reply in found.values())
        return [[found[candidate, place] for place in range(len(chosen))] for candidate in range(len(table))]

    def _chosen(self, samples: Sequence[int] | None) -> list[int]:
        return sample_indices(samples, len(self.samples))

    def _table(self, candidates: Sequence[Ints]) -> Ints:
        longest = max(len(sample.prompt) for sample in self.samples)
        return candidate_table(candidates, self.shape, self.cap, longest)

    def _per_token(self, sums: Floats, chosen: Sequence[int]) -> Floats:
        counts: Ints = np.array([max(1, len(self.samples[index].answer)) for index in chosen])
        return np.asarray(sums / counts, dtype=np.float64)

    def _run(self, table: Ints, chosen: Sequence[int], works: Sequence[Work], act: Act) -> None:
        """`act` on all candidates and samples, as many together as memory permits."""
        if not len(table):
            return
        widths = np.minimum(table.max((0, 2)), self.cap).tolist()

        def load(places: list[int]) -> Portion:
            return self._prepared.portion([chosen[place] for place in places], widths)

        with running(self.loaded.model):
            for block in blocks(works, self._sizes, len(table), self._memory - self._store.nbytes):
                self._splitting.run(block, len(table), load, act)

    def _loss(self, objective: ObjectiveName, indices: Sequence[int]) -> Callable[[Tensor], Floats]:
        """Sums of losses [S] by logits [S, R, V] of these samples."""
        chosen = [self.samples[index] for index in indices]
        answers, _ = left_padded(
            [sample.answer[len(sample.answer) - sample.predicting :] for sample in chosen], -1, self.loaded.device
        )
        if objective == "nll":
            return lambda logits: answer_nll(logits, answers)
        full = side_by_side([self._prepared.full_log_probs(index) for index in indices], right=True)[:, 0]
        return lambda logits: answer_kl(logits, full, answers)

    def _room(self) -> int:
        """Bytes of the memory that prompts may take for good: enough must be left for a pass."""
        works = [work for sample in self.samples for work in self._works(sample)]
        return max(0, min(self._memory // 2, self._memory - check_fits(self._sizes, works, self._memory)))

    def _works(self, sample: BankSample) -> list[Work]:
        full = [Work.forcing(sample, len(sample.prompt))] if self.full else []
        return [*full, Work.forcing(sample, self.cap), Work.replying(sample, self.cap, sample.limit)]
