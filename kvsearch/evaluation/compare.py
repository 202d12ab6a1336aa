"""One evaluation: methods and plans, the full cache and baselines on the same samples, at the same entries."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict, dataclass, field, fields, replace
from functools import cached_property
from operator import attrgetter
from statistics import fmean
from typing import Any

from kvsearch.core.arrays import TIE
from kvsearch.core.canonical import hash_json
from kvsearch.core.errors import IncompatibleError, UsageError
from kvsearch.core.items import Progress, group_by_key
from kvsearch.evaluation.names import FULL as FULL
from kvsearch.evaluation.ready_methods import ReadyMethod, describe_different_settings, make_full_cache_method
from kvsearch.evaluation.reply_store import ReplyStore
from kvsearch.evaluation.runner import KeptReplies, describe_environment, find_metric_name, hash_rows, run_encoded
from kvsearch.evaluation.samples import Contexts, Footprint, Sample
from kvsearch.evaluation.statistics import (
    LEAST_DONE,
    MACRO,
    RETAINED,
    SizeBlock,
    TraceLength,
    contrast_scores,
    find_retained,
    group_scores,
    make_blocks,
    measure_retained_gap,
    summarize,
)
from kvsearch.evaluation.totals import check_totals, decode_entries
from kvsearch.models.architecture import describe
from kvsearch.models.loading import LoadedModel
from kvsearch.models.work import StageCost, Work
from kvsearch.plan import Plan
from kvsearch.plan.origin import USES, ContextRecord, ContextSet, Use
from kvsearch.plan.schema import QUESTION_AGNOSTIC, Protocol
from kvsearch.runs.estimates import Difference, Estimate, TextLoss, find_doubt
from kvsearch.runs.identity import METRICS, Job, RunConfig
from kvsearch.runtime import Program
from kvsearch.runtime.decode.next_tokens import describe_generation_settings
from kvsearch.runtime.shared_prefill import make_batches
from kvsearch.runtime.speed import estimate_compression
from kvsearch.tasks.base import Coverage, Sampling, Task
from kvsearch.tasks.encode import (
    Question,
    TaskPrompts,
    compute_token_limit,
    encode_tasks,
    format_reasons,
    limit_questions,
    list_questions,
    make_readings,
    name_contexts,
)
from kvsearch.tasks.longbench import AVERAGES, LongBenchTask
from kvsearch.tasks.metrics import is_forced
from kvsearch.tasks.metrics.likelihood import FORCED, MOST_LOST, read_losses
from kvsearch.tasks.retain import RETAIN
from kvsearch.tasks.synthetic.suite import FACTS_AMONG_FACTS

OpenStage = AbstractContextManager[tuple[ReplyStore | None, Progress | None]]
StageStore = Callable[[str, "Evaluation"], OpenStage]  # opens what keeps the replies of a stage, by its name

ROUNDING_SETTINGS = ("batch", "max_memory")  # settings that replies depend on by rounding alone
# times that reading a prompt takes, by benchmarks/said_and_taken.py on a CPU
COLUMN_SUM_PASSES = 0.7  # for attention column sums
SECOND_READING_PASSES = 2.0  # to read it again
STEP_PASSES = 7.0  # passes that a step takes for a program that evicts while it replies
REPLY_TO_RIGHT = 2  # tokens of a reply, in times of the right one, as most models end replies soon after it
UNKNOWN_CONTEXTS = "which contexts it was fitted and chosen on is not known"


class ContextOverlap:
    """How many of an evaluation's contexts a method was fitted or chosen on; `record` is None where unknown."""

    def __init__(self, record: ContextRecord | None, encoded: Sequence[TaskPrompts]) -> None:
        prompts = [prompt.hashes for task in encoded for prompt in task.prompts]
        known = record or ContextRecord()
        self.record = record
        self.contexts = len(prompts)
        self.shared: dict[Use, int] = {
            use: sum(any(map(getattr(known, use).has, hashes)) for hashes in prompts) for use in USES
        }

    @property
    def warning(self) -> str | None:
        """Why the score is too good, or None: contexts of this evaluation were fitted or chosen on."""
        overlaps = [f"{use} on {self.shared[use]}" for use in ("fitted", "chosen") if self.shared[use]]
        if not overlaps:
            return None
        return (
            f"it was {' and '.join(overlaps)} of the {self.contexts} contexts asked here, so its score is too good: "
            "ask others (--seed, --split or --tasks)"
        )

    @property
    def notes(self) -> list[str]:
        """Notes to print beside the method's scores."""
        if self.record is None:
            return [f"{UNKNOWN_CONTEXTS} (it was written by hand or by an older version)"]
        notes = [] if self.warning is None else [self.warning]
        if self.record.chosen.ids:
            notes.append(f"it was chosen on {len(self.record.chosen.ids)} contexts")
        if not self.record.complete:
            notes.append(f"of a part of what it was made of, {UNKNOWN_CONTEXTS}")
        return notes

    def as_json(self) -> dict[str, Any]:
        """Return the overlap as JSON: by use, the record's contexts, and how many are evaluated, too (`asked_here`)."""
        if self.record is None:
            return {"known": False}
        sets: dict[str, Any] = {
            use: {"contexts": len(getattr(self.record, use).ids), "asked_here": self.shared[use]} for use in USES
        }
        return {"known": True, "complete": self.record.complete, **sets}


@dataclass(frozen=True, eq=False)
class Split:
    """Tasks with the settings to evaluate them: up to `samples` contexts of each, `batch` prompts at a time.

    `max_memory` is the most bytes for compressed caches at a time, see `compressed`. Contexts that are in `used`
    are left out, see `encode_tasks`. Replies are greedy without `sampling`. Of a context at most so many `questions`
    are asked; None: all.
    """

    tasks: Sequence[Task]
    samples: int = 20
    protocol: Protocol = QUESTION_AGNOSTIC
    seed: int = 0
    batch: int = 8
    max_memory: int | None = None
    max_length: int | None = None
    used: ContextSet | None = None
    sampling: Sampling | None = None
    questions: int | None = None

    def as_json(self) -> dict[str, Any]:
        """Return the split's settings as JSON, but for what the results record: used contexts and limited questions."""
        stated = {
            setting.name: getattr(self, setting.name)
            for setting in fields(self)[1:]
            if setting.name not in ("used", "sampling", "questions")
        }
        return stated if self.sampling is None else {**stated, "sampling": asdict(self.sampling)}

    def encode(self, loaded: LoadedModel) -> list[TaskPrompts]:
        """Draw and encode the examples of all tasks; errors as for `encode_tasks`."""
        settings = (self.samples, self.seed, self.max_length, self.used, self.sampling)
        encoded = encode_tasks(loaded, self.tasks, *settings)
        return encoded if self.questions is None else [limit_questions(task, self.questions) for task in encoded]

    def without(self, used: ContextSet | None) -> Split:
        """Return the split without contexts that were used for something else."""
        return replace(self, used=used)


def _find_spread(values: Iterable[float]) -> float:
    spread_values = list(values)
    return max(spread_values) - min(spread_values)


def _format_entries(entries: Mapping[str, float | None]) -> str:
    return ", ".join(f"{name} {'all' if held is None else f'{held:.0f}'}" for name, held in entries.items())


def estimate_replies(
    model: Any, name: str, encoded: Sequence[TaskPrompts], split: Split, programs: Sequence[Program]
) -> StageCost:
    """Estimate the cost of the stage `name`, which asks all questions under some programs.

    A prompt is read once for all of them, and compressed for each, which is timed. Replies are decoded in one batch,
    but for programs that evict while they reply; how long they are is guessed, see `estimate_reply_tokens`.
    """
    read_lengths = _list_lengths(encoded, split.protocol)
    per_token = estimate_compression(model, programs, max(read_lengths, default=0))
    work = Work(seconds=per_token * sum(read_lengths))
    more_readings = _estimate_readings(programs)
    contexts = questions = 0
    # Programs that evict nothing while decoding decode as one batch; each of the others has steps of its own.
    together = 1 + STEP_PASSES * sum(program.decode is not None for program in programs)
    for task in encoded:
        contexts += task.coverage.contexts
        replies = not is_forced(task.task)
        times = 2 if replies and task.forced_tokens else 1  # that a question is read: right replies are forced, too
        for batch in make_batches(make_readings(task.prompts, split.protocol), split.batch, lambda _: ()):
            pairs = list_questions(batch)
            questions += len(pairs)
            work += Work.over((len(reading.ids) for reading in batch), 1 + more_readings)
            for number in range(max(len(reading.questions) for reading in batch)):
                replied = [reading.questions[number] for reading in batch if number < len(reading.questions)]
                work += Work(passes=together * times)
                if replies:
                    counts = list(map(estimate_reply_tokens, replied))
                    work += Work.replying(len(programs) * sum(counts), together * max(counts))
            after = sum(len(reading.following(question)) for reading, question in pairs)
            limit = task.forced_tokens if replies else None
            forced = sum(len(question.right[:limit]) for _, question in pairs)
            work += Work(tokens=len(programs) * (times * after + forced))
    return StageCost(name, contexts, questions, work)


def estimate_reply_tokens(question: Question) -> int:
    """Estimate the tokens of a reply from the right one; as many as it may have where no right one is known."""
    limit = question.query.max_new_tokens
    return min(limit, REPLY_TO_RIGHT * len(question.right)) if len(question.right) else limit


def _estimate_readings(programs: Sequence[Program]) -> float:
    """Estimate the time of column sums and of a second reading, in times of reading a prompt; policies share both."""
    phases = [program.prefill for program in programs if program.prefill is not None]
    needs = {policy: policy.needs() for phase in phases for policy in phase.policies.values()}.values()
    summed = any(need.column_sums for need in needs)
    read_twice = any(program.reads_twice for program in programs)
    return COLUMN_SUM_PASSES * summed + SECOND_READING_PASSES * read_twice


@dataclass(frozen=True, eq=False)
class Evaluation:
    """A comparison of methods on the same questions: checked and encoded, and once it has run with its replies.

    `subject` is the method that the others are compared with. `size_notes` say how sizes and prompts fit together.
    `names` map every plan to the label of the method that replies for it: equal plans share their replies, and the
    full cache is always included. `samples` are the replies once it has run; scores and tables are made of them.
    """

    loaded: LoadedModel
    methods: tuple[ReadyMethod, ...]
    subject: str
    encoded: list[TaskPrompts]
    split: Split
    size_notes: tuple[str, ...] = ()
    names: Mapping[str, str] = field(default_factory=dict)
    samples: Sequence[Sample] = ()

    def of(self, names: Sequence[str], questions: list[TaskPrompts]) -> Evaluation:
        """Return the evaluation of some plans and the full cache, on a part of the questions."""
        labels = {name: self.names[name] for name in (FULL, *names)}
        methods = tuple(method for method in self.methods if method.label in labels.values())
        return replace(self, methods=methods, encoded=questions, names=labels)

    @property
    def replies(self) -> int:
        """The number of replies: methods times questions."""
        return len(self.methods) * sum(task.coverage.questions for task in self.encoded)

    def cost(self, name: str) -> StageCost:
        """Estimate the cost of this evaluation as the stage `name`."""
        programs = [method.program for method in self.methods]
        return estimate_replies(self.loaded.model, name, self.encoded, self.split, programs)

    @cached_property
    def seen(self) -> dict[str, ContextOverlap]:
        """The overlap of every method's record, by name, with the evaluated contexts."""
        return {method.name: ContextOverlap(method.contexts, self.encoded) for method in self.methods}

    @property
    def metrics(self) -> dict[str, str]:
        """The metric of each task, by name."""
        return {task.task.name: find_metric_name(task.task) for task in self.encoded}

    def config(self) -> RunConfig:
        """Return the configuration of a run; its content is everything that the samples depend on."""
        settings = {name: value for name, value in self.split.as_json().items() if name != "protocol"}
        content = {
            **describe_environment(self.loaded),
            "protocol": self.split.protocol,
            "methods": {
                method.label: {**method.definition, "sha256": hash_json(method.definition)} for method in self.methods
            },
            "tasks": {
                task.task.name: {
                    "category": task.coverage.category, "contexts": task.coverage.contexts,
                    "questions": task.coverage.questions, "wanted": task.coverage.wanted,
                    "rows_sha256": hash_rows(task),
                }
                for task in self.encoded
            },
            **settings,
        }  # fmt: skip
        return RunConfig(job="evaluate", content=content, execution={METRICS: self.metrics})

    def stage_config(self, job: Job, **content: object) -> RunConfig:
        """Return the configuration of a stage of another job, whose `content` identifies the methods.

        So a stage with other methods goes on with the same replies, and so does one with another batch, which changes
        replies by rounding alone.
        """
        whole = self.config()
        # Methods come and go between rounds, and a batch changes last bits: neither makes the replies of a stage
        # others.
        left = {name: value for name, value in whole.content.items() if name not in ("methods", *ROUNDING_SETTINGS)}
        rounding = {name: whole.content[name] for name in ROUNDING_SETTINGS}
        return RunConfig(job=job, content={**left, **content}, execution={**whole.execution, **rounding})

    def run(self, progress: Progress | None = None, store: ReplyStore | None = None) -> Evaluation:
        """Generate and score all replies that are not in the store; see `run_encoded` for the errors."""
        return replace(self, samples=self._replies(self.methods, progress, store))

    def run_stage(self, name: str, store: StageStore | None, *, answered: bool = False) -> Evaluation:
        """Run as the stage `name`, whose replies are kept in `store` (None: nowhere); see `run`.

        `answered`: only if the full cache can answer, see `require_answers`.
        """
        stage: OpenStage = nullcontext((None, None)) if store is None else store(name, self)
        with stage as (replies, progress):
            if answered:
                self.require_answers(progress, replies)
            return self.run(progress, replies)

    def require_answers(self, progress: Progress | None = None, store: ReplyStore | None = None) -> list[Sample]:
        """Evaluate the full cache alone, before anything that takes long, and return its replies; see `run`.

        Raises:
            IncompatibleError: it scores next to nothing, so nothing could be chosen by these questions.
        """
        samples = self._replies([method for method in self.methods if method.name == FULL], progress, store)
        doubt = find_doubt(summarize(samples, FULL, self.contexts)[-1].scores[FULL])
        if doubt is not None:
            raise IncompatibleError(f"{self.loaded.name} on {', '.join(self.metrics)}: {doubt}")
        return samples

    def _replies(
        self, methods: Sequence[ReadyMethod], progress: Progress | None, store: ReplyStore | None
    ) -> list[Sample]:
        """Generate and score the replies of some methods that are not in the store."""
        split = self.split
        kept = None if store is None else KeptReplies(store, self.loaded, methods, split.protocol)
        programs = {method.label: method.program for method in methods}
        return run_encoded(
            self.loaded, programs, self.encoded, split.protocol, split.batch, progress, split.max_memory, kept
        )

    # --- what the replies come to ----------------------------------------------------------------------------------

    @cached_property
    def averages(self) -> dict[str, tuple[str, ...]]:
        """The tasks of every average: of all tasks ("macro"), and of papers, where their datasets are there."""
        tasks = [task.task for task in self.encoded]
        known = {task.name for task in tasks if isinstance(task, LongBenchTask)}
        of_papers = {name: datasets for name, datasets in AVERAGES.items() if known.issuperset(datasets)}
        return {MACRO: tuple(task.name for task in tasks), **of_papers}

    @cached_property
    def retained(self) -> tuple[str, ...]:
        """The tasks that the average `RETAINED` is of."""
        return tuple(find_retained(group_scores(self.samples, self.contexts)))

    def retained_shares(self) -> dict[str, Estimate]:
        """Return what every plan retains, by name, see `summarize_retained`; empty where that cannot be said."""
        row = next((row for row in self.blocks[0].rows if (row.kind, row.task) == ("average", RETAINED)), None)
        return {} if row is None else {name: row.scores[label] for name, label in self.names.items()}

    def retained_gap(self, name: str) -> Estimate | None:
        """Return how much less a plan retains than it keeps of the score, see `measure_retained_gap`."""
        return measure_retained_gap(self.samples, self.names[name], self.contexts)

    @cached_property
    def contexts(self) -> Contexts:
        """Which samples share a context, see `name_contexts`."""
        return name_contexts(self.encoded)

    @cached_property
    def blocks(self) -> list[SizeBlock]:
        """The scores of all methods, by size."""
        return make_blocks(self.samples, self.methods, self.subject, self.averages, self.contexts)

    @cached_property
    def traces(self) -> dict[str, dict[str, TraceLength]]:
        """How long the replies to traced tasks are, by method and task."""
        return TraceLength.by_method(self.samples, self.encoded, self.contexts)

    @cached_property
    def coverage(self) -> list[Coverage]:
        """How many contexts and questions of each task are evaluated."""
        return [task.coverage for task in self.encoded]

    @cached_property
    def decode_entries(self) -> Mapping[str, float]:
        """What a decode phase allows, the mean over the prompts, by the label of every method that has one.

        Layers that a plan leaves alone hold the prompt.
        """
        shape = describe(self.loaded.model)
        lengths = _list_lengths(self.encoded, self.split.protocol)
        phases = {method.label: method.program.decode for method in self.methods if method.program.decode is not None}
        return {
            label: fmean(
                decode_entries(phase, n) + (len(shape.full_layers) - len(phase.policies)) * shape.kv_heads * n
                for n in lengths
            )
            for label, phase in phases.items()
        }

    @cached_property
    def environment(self) -> dict[str, Any]:
        """The model and what it ran on."""
        return describe_environment(self.loaded)

    @cached_property
    def most_tokens(self) -> int | None:
        """The limit on tokens of prompt and reply together; None without one."""
        return compute_token_limit(self.loaded.model, self.split.max_length)

    def score(self, name: str) -> Estimate:
        """Return the mean of a plan over all tasks with its 95% interval."""
        return self.blocks[0].overall.scores[self.names[name]]

    def nats(self, name: str) -> dict[str, TextLoss]:
        """Return the losses of all plans, with differences to `name`; empty unless all tasks are teacher-forced."""
        losses = summarize(self.samples, self.names[name], self.contexts)[-1].nats
        return {other: losses[label] for other, label in self.names.items() if label in losses}

    def gain(self, name: str, others: Sequence[str]) -> Difference:
        """Return a plan's lead over the mean score of others, paired by question, with its 95% interval."""
        weights: dict[str, float] = {self.names[name]: 1.0}
        for other in others:
            label = self.names[other]
            weights[label] = weights.get(label, 0.0) - 1 / len(others)
        return contrast_scores(self.samples, weights, self.contexts)

    def find_higher_plans(self, name: str) -> dict[str, Difference]:
        """Return the leads of plans that score higher than `name`, largest first; the full cache aside."""
        mean = self.score(name).mean
        higher = [other for other in self.names if other not in (FULL, name) and self.score(other).mean > mean + TIE]
        leads = {other: self.gain(other, [name]) for other in higher}
        return dict(sorted(leads.items(), key=lambda item: -item[1].mean))

    @property
    def phases(self) -> str:
        """When all but the full cache evict: prefill, decode or both; several joined by commas."""
        return ", ".join(sorted({method.phases for method in self.methods if method.name != FULL}))

    @property
    def doubt(self) -> str | None:
        """Why the comparison may say little, if it does."""
        return find_doubt(self.blocks[0].overall.scores[FULL])

    @property
    def following(self) -> str | None:
        """Which settings of the model's generation config apply to replies; None if no setting does."""
        drawn = any(task.sampling is not None for task in self.encoded)
        return describe_generation_settings(self.loaded.model, drawn=drawn)

    @property
    def different(self) -> str | None:
        """Which settings the compared policies differ in, if they do."""
        return describe_different_settings(self.methods)

    @property
    def notes(self) -> list[str]:
        """Notes on what was left out or cut, and on sizes that differ; empty if all is well."""
        return [
            *([] if self.doubt is None else [self.doubt]),
            *([] if self.following is None else [self.following]),
            *(f"{name}: {note}" for name, seen in self.seen.items() for note in seen.notes),
            *self.size_notes,
            *self._hopeless_notes(),
            *self._loss_notes(),
            *self._retained_notes(),
            *(note for covered in self.coverage for note in self._coverage_notes(covered)),
            *(note for block in self.blocks for note in self._size_notes(block)),
        ]

    @cached_property
    def distinct(self) -> dict[str, int]:
        """How many different contexts each task has; intervals are over these."""
        return {task.task.name: task.distinct for task in self.encoded}

    @property
    def labels(self) -> list[str]:
        """The labels of all methods, the full cache first."""
        return [method.label for method in self.methods]

    @cached_property
    def held(self) -> dict[str, Footprint]:
        """The cache entries and bytes of each method, by label, means over the questions."""
        return {
            label: Footprint(*(fmean(getattr(sample, field.name) for sample in samples) for field in fields(Footprint)))
            for label, samples in group_by_key(self.samples, attrgetter("method")).items()
        }

    def _hopeless_notes(self) -> Iterator[str]:
        alike = [covered.task for covered in self.coverage if covered.category == FACTS_AMONG_FACTS]
        if alike and self.split.protocol == QUESTION_AGNOSTIC:
            yield (
                f"{', '.join(alike)}: the evidence looks like the haystack, so no ranking that does not know the "
                "question can keep it where most entries go"
            )

    def _loss_notes(self) -> Iterator[str]:
        for task in [task for task, metric in self.metrics.items() if metric == FORCED]:
            losses = [read_losses(sample.reply) for sample in self.samples if sample.task == task]
            full = fmean(loss[1] for loss in losses if loss is not None)
            note = f"{task}: the full cache has a perplexity of {math.exp(full):.4g}, {full:.4f} nats per token"
            if set(self.metrics.values()) != {FORCED}:  # else no score is shown
                note += f"; its score in averages is 100 less a point for every {MOST_LOST / 100:g} nats more, or 0"
            yield note

    def _retained_notes(self) -> Iterator[str]:
        for covered in self.coverage:
            if covered.category == RETAIN and covered.task not in self.retained:
                done = fmean(s.score for s in self.samples if (s.task, s.method) == (covered.task, FULL))
                yield (
                    f"{covered.task}: the full cache does it in {100 * done:.0f}%, below {100 * LEAST_DONE:.0f}%: not "
                    f"counted in {RETAINED!r}"
                )

    def _coverage_notes(self, covered: Coverage) -> Iterator[str]:
        if covered.shortfall is not None:
            yield covered.shortfall
        if covered.cut is not None:
            yield f"{covered.cut}, so that prompt and reply fit {self.most_tokens} tokens"
        if (distinct := self.distinct[covered.task]) < covered.contexts:
            yield f"{covered.task}: only {distinct} of {covered.contexts} contexts differ: intervals are over these"
        traces = {
            label: lengths[covered.task].at_limit for label, lengths in self.traces.items() if covered.task in lengths
        }
        if any(traces.values()):
            cut = ", ".join(f"{label} {count}" for label, count in traces.items())
            yield f"{covered.task}: of {covered.questions} replies so many reached the most tokens of a reply: {cut}"
        if covered.excluded:
            yield f"{covered.task}: questions left out ({format_reasons(covered.excluded)})"

    def _size_notes(self, block: SizeBlock) -> Iterator[str]:
        held = {name: self.held[label] for name, label in block.methods.items()}
        even = _find_spread(footprint.entries for footprint in held.values()) <= 0.5
        if not even:
            entries = {name: footprint.entries for name, footprint in held.items()}
            yield f"not all hold the same, mean entries: {_format_entries(entries)}"
        allowed = {name: self.decode_entries.get(label) for name, label in block.methods.items()}
        known = [entries for entries in allowed.values() if entries is not None]
        if known and (len(known) < len(allowed) or _find_spread(known) > 0.5):
            yield f"not all may hold the same while they reply, mean entries: {_format_entries(allowed)}"
        peaks = {name: footprint.most for name, footprint in held.items()}
        if _find_spread(peaks.values()) > 0.01 * min(peaks.values()):
            why = ", as their replies differ in length" if even and not known else ""
            listed = _format_entries(peaks)
            yield f"not all held the same at most until a reply was complete{why}, mean entries: {listed}"


def prepare(loaded: LoadedModel, methods: Sequence[ReadyMethod], subject: str, split: Split) -> Evaluation:
    """Draw the examples, and check that they and the methods fit together; `subject` is a name.

    Raises:
        UsageError, IncompatibleError: see `encode_tasks` and `check_totals`.
    """
    encoded = split.encode(loaded)
    notes = check_totals(loaded, methods, _list_lengths(encoded, split.protocol))
    return Evaluation(loaded, tuple(methods), subject, encoded, split, tuple(notes))


def prepare_plans(loaded: LoadedModel, plans: Mapping[str, Plan], split: Split) -> Evaluation:
    """Check that plans and tasks fit together; plans that differ in nothing but their origin run once.

    Raises:
        UsageError: a plan has the name of the full cache.
        UsageError, IncompatibleError: see `prepare` and `Program.from_plan`.
    """
    if FULL in plans:
        raise UsageError(f"two of what is tried are called {FULL!r}: name them differently")
    methods = {FULL: make_full_cache_method(loaded)}
    labels = {FULL: FULL}
    known: dict[str, str] = {}
    for name, plan in plans.items():
        content = plan.content_sha256
        labels[name] = known.setdefault(content, name)
        if labels[name] == name:
            methods[name] = ReadyMethod(name, Program.from_plan(loaded.model, plan), {"plan_content": content})
    return replace(prepare(loaded, list(methods.values()), FULL, split), names=labels)


def _list_lengths(encoded: Sequence[TaskPrompts], protocol: Protocol) -> list[int]:
    """Return tokens of everything that is compressed as one."""
    return [len(reading.ids) for task in encoded for reading in make_readings(task.prompts, protocol)]
