"""What tables and rankings are worth where they were not fitted: the table of docs/transfer.md.

    python benchmarks/study_transfer.py --output runs/transfer     # half an hour on two idle cores

LU-KV's budgets over SnapKV (as measured, without the check of `calibrate`) and a fitted ranking under even budgets are
fitted on one kind of questions and asked the other, fitted at one length and asked at another, fitted on one model and
asked of another. `bundled-redundant` is `bundled` trained further: each stands for a copy of the other that was tuned
after the fit. What is asked was in no fit.

Printed is how alike the foreign fit and the own one are, what the own one scores, and what the foreign one scores more
under the same questions. Alike is, for budgets, Spearman's rank correlation over all kv heads, the mean of the three
sizes; for rankings, the share of entries that both keep at 10%, the mean over heads and contexts (chance is 10%). The
same command goes on where it stopped.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
from scipy.stats import spearmanr

import kvsearch
from kvsearch.models.loading import LoadedModel, load
from kvsearch.plan.profile import load_profile, save_profile
from kvsearch.report.table import format_interval, format_percent
from kvsearch.tasks.catalog import find_tasks
from kvsearch.tasks.encode import encode_tasks

MODELS = ("bundled", "bundled-redundant")
METHODS = {"lukv": "LU-KV's budgets", "probe": "a fitted ranking"}
UNCHECKED: dict[str, dict[str, bool]] = {"lukv": {"check": False}, "probe": {}}
RATIOS = (0.8, 0.9, 0.95)
PROFILE = "profile.safetensors"
LOOK_UPS = "single,multikey,chain"
LISTS = "multiquery,multivalue,vote"


@dataclass(frozen=True)
class Corpus:
    """Kinds of the bundled language at a length of context in tokens; a fit reads `samples` contexts of each kind."""

    kinds: str
    length: int
    samples: int

    @property
    def tasks(self) -> str:
        """What `--tasks` takes."""
        return f"synthetic:{self.kinds}"


@dataclass(frozen=True)
class Transfer:
    """A corpus that a model is asked, and the corpus and model that the foreign fit is of."""

    name: str
    asked: Corpus
    fitted: Corpus
    other_model: bool = False


ONE_LINE = Corpus(LOOK_UPS, 1024, 4)
SEVERAL = Corpus(LISTS, 1024, 4)
LONG = Corpus(f"{LOOK_UPS},{LISTS}", 1024, 2)
SHORT = Corpus(f"{LOOK_UPS},{LISTS}", 768, 2)

TRANSFERS = (
    Transfer("look-ups, asked for lists", SEVERAL, ONE_LINE),
    Transfer("lists, asked for look-ups", ONE_LINE, SEVERAL),
    Transfer("768 tokens, asked at 1,024", LONG, SHORT),
    Transfer("1,024 tokens, asked at 768", SHORT, LONG),
    Transfer("the other model", LONG, LONG, other_model=True),
)


def fit(method: str, model: str, corpus: Corpus, output: Path) -> Path:
    """Fit a method, unless that was done before, and return the folder of the fit."""
    directory = output / f"{method}-{model}-{corpus.kinds.replace(',', '-')}-{corpus.length}"
    if not (directory / PROFILE).exists():
        kvsearch.calibrate(
            model, method=method, tasks=corpus.tasks, length=corpus.length, samples=corpus.samples, output=directory,
            **UNCHECKED[method],
        )  # fmt: skip
    return directory


def relabel(directory: Path, loaded: LoadedModel) -> Path:
    """Return a copy of another model's fit that says it is of this one: kvsearch refuses it as it is."""
    copy = directory.with_name(f"{directory.name}-for-{loaded.name}")
    profile = load_profile(directory / PROFILE)
    metadata = profile.metadata.model_copy(update={"model": loaded.fingerprint})
    copy.mkdir(exist_ok=True)
    save_profile(replace(profile, metadata=metadata), copy / PROFILE, overwrite=True)
    return copy


def correlate_budgets(own: Path, foreign: Path) -> float:
    """Return Spearman's correlation of the local ratios of all kv heads, the mean over RATIOS."""
    mine = load_profile(own / PROFILE)
    others = load_profile(foreign / PROFILE)
    correlations = [
        spearmanr(mine.local_ratios(ratio).ravel(), others.local_ratios(ratio).ravel()).statistic for ratio in RATIOS
    ]
    return float(np.mean(correlations))


def share_kept_by_both(own: Path, foreign: Path, asked: Corpus, loaded: LoadedModel) -> float:
    """Return the share of the entries kept at 10% that both rankings keep, the mean over heads and contexts."""
    tasks = find_tasks(asked.tasks, {"length": (asked.length,)})
    prompts = [prompt for task in encode_tasks(loaded, tasks, 1) for prompt in task.prompts]
    kept = []
    for directory in (own, foreign):
        plan = kvsearch.plans.uniform(
            loaded.model, tokenizer=loaded.tokenizer, policy=f"probe={directory}", ratio=0.9, length=asked.length,
            output=directory / "even.json", force=True,
        )  # fmt: skip
        with kvsearch.attach(loaded.model, plan) as planned:
            kept.append([head for prompt in prompts for head in kept_by_head(planned.read(prompt.context[None]))])
    return float(np.mean([len(mine & others) / len(mine) for mine, others in zip(*kept, strict=True)]))


def kept_by_head(cache: kvsearch.PlanCache) -> Iterator[frozenset[int]]:
    """Yield the positions that each kv head of each layer keeps."""
    for layer, entries in zip(cache.planned, cache.entries(), strict=True):
        for head in range(entries.shape[1]):
            yield frozenset(cache.kept_positions(layer, head=head))


def compare(model: str, methods: tuple[str, str], asked: Corpus, samples: int, output: Path) -> Iterator[str]:
    """Ask two fits the same questions; yield, by size, the first one's score and what the second one scores more."""
    result = kvsearch.evaluate(
        model, methods=methods, ratios=RATIOS, tasks=asked.tasks, length=asked.length, samples=samples, output=output
    )
    for block in result.blocks:
        mine, others = block.methods
        assert others.differences is not None
        difference = result.overall.of(others.differences)
        yield f"{format_percent(result.overall.of(mine.scores).mean, 1)}, {format_interval(difference, '+.1f')}"


def main() -> None:
    """Fit, compare and print the table, a row as soon as it is known."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, required=True, help="folder of fits and evaluations")
    parser.add_argument("--samples", type=int, default=10, help="contexts of each kind that are asked")
    options = parser.parse_args()
    print("| model | fitted | fitted on | alike | 20% kept | 10% | 5% |")
    print("|---|---|---|---|---|---|---|")
    for model in MODELS:
        loaded = load(model)
        (other,) = set(MODELS) - {model}
        for method, words in METHODS.items():
            for transfer in TRANSFERS:
                own = fit(method, model, transfer.asked, options.output)
                source = other if transfer.other_model else model
                foreign = fit(method, source, transfer.fitted, options.output)
                foreign = relabel(foreign, loaded) if transfer.other_model else foreign
                if method == "lukv":
                    alike = f"{correlate_budgets(own, foreign):.2f}"
                    methods = (f"own={own}", f"foreign={foreign}")
                else:
                    alike = f"{format_percent(share_kept_by_both(own, foreign, transfer.asked, loaded), 0)}%"
                    methods = (f"probe={own}", f"probe={foreign}")
                run = options.output / f"{foreign.name}-against-{own.name}"
                scores = compare(model, methods, transfer.asked, options.samples, run)
                print(f"| {model} | {words} | {transfer.name} | {alike} | {' | '.join(scores)} |", flush=True)


if __name__ == "__main__":
    main()
