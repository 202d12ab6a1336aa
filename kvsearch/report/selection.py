"""What a selection found: its records, its JSON, the decision in words, and the tables that show it."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any, Literal

from kvsearch.choose.acceptance import Rule, Share
from kvsearch.plan import Plan, Size
from kvsearch.plan.protocol import Protocol
from kvsearch.report.tables import Cell, Group, TextTable
from kvsearch.runs.estimates import Difference, Estimate
from kvsearch.strategies.methods import FULL

SCHEMA, FILE = "kvsearch.selection/1", "selection.json"
Kind = Literal["candidate", "baseline"]
SHOWN = 10  # rows of the table of a first stage
DECODE_ONLY = (
    "decode-only strategies hold the full cache at the end of prefill: their peak memory is that of no eviction"
)


@dataclass(frozen=True)
class Asked:
    """How much was asked."""

    contexts: int
    questions: int


@dataclass(frozen=True)
class Standing:
    """What an entrant scored in the first stage, and in the second if it got there.

    `lead` is what a candidate scored above the best baseline in the second stage, with the 95% interval of this pair
    alone; `chance` is the probability that the largest of all leads there is as large by luck.
    """

    name: str
    kind: Kind
    first: Estimate
    second: Estimate | None = None
    lead: Difference | None = None
    chance: float | None = None
    accepted: bool = False


@dataclass(frozen=True)
class Outcome:
    """One phase setting; standings are by score, those of the second stage first.

    `level` is what chances are compared with, unless there is a `margin`. `best` is the best baseline, `winner` the
    accepted candidate that scores highest.
    """

    phases: str
    standings: tuple[Standing, ...]
    full: Estimate
    best: str
    winner: str | None
    level: float
    margin: float | None
    first: Asked
    second: Asked
    notes: tuple[str, ...] = ()

    @property
    def written(self) -> str:
        """What this setting ends with: its winner, or else its best baseline."""
        return self.winner or self.best

    def standing(self, name: str) -> Standing:
        """What is known of an entrant."""
        return next(one for one in self.standings if one.name == name)

    @property
    def score(self) -> float:
        """The second stage's score of what this setting ends with."""
        found = self.standing(self.written).second
        return 0.0 if found is None else found.mean

    def count(self, kind: Kind) -> int:
        """How many candidates or baselines there were."""
        return sum(one.kind == kind for one in self.standings)

    @property
    def finalists(self) -> list[Standing]:
        """The candidates of the second stage."""
        return [one for one in self.standings if one.lead is not None]


@dataclass(frozen=True)
class Held:
    """Mean entries of a contender after its prompt was compressed, and at most until the reply was complete."""

    entries: float
    most: float


@dataclass(frozen=True)
class Reported:
    """The report split, which nothing was chosen by: scores by name, the full cache among them.

    `gain` is of the winner over the best baseline, `share` what it recovers of the gap to the full cache; None without
    a winner, `share` also where the full cache is not above the best baseline.
    """

    asked: Asked
    scores: dict[str, Estimate]
    held: dict[str, Held]
    gain: Difference | None
    share: Share | None
    notes: tuple[str, ...] = ()


@dataclass(frozen=True, eq=False)
class Selection:
    """A finished selection; `plan` is that of the outcome that scores highest in its second stage."""

    model: str
    size: Size
    protocol: Protocol
    seed: int
    rule: Rule
    outcomes: tuple[Outcome, ...]
    chosen: Outcome
    even: str
    plan: Plan
    report: Reported

    def as_json(self) -> dict[str, Any]:
        """Everything, for programs; scores are in [0, 1]."""
        return {
            "schema": SCHEMA, "model": self.model, **self.size.as_json(), "protocol": self.protocol, "seed": self.seed,
            "rule": asdict(self.rule),
            "outcomes": [{**asdict(one), "written": one.written, "decision": decision(one)} for one in self.outcomes],
            "written": {
                "phases": self.chosen.phases, "name": self.chosen.written, "fallback": self.chosen.winner is None,
                "total": self.plan.total,
            },
            "report": {**asdict(self.report), "baseline": self.chosen.best, "uniform": self.even, "words": gap(self)},
            "notes": notes(self),
        }  # fmt: skip


def decision(outcome: Outcome) -> str:
    """What was decided for one phase setting and why, in one sentence."""
    baselines, many = _counted(outcome.count("baseline"), "baseline"), outcome.count("candidate")
    finalists = outcome.finalists
    fresh = f"{_counted(outcome.second.questions, 'fresh question')} about {_contexts(outcome.second)}"
    if not finalists:
        return (
            f"fallback to {outcome.best}, the best of {baselines} on all questions: there is no candidate, every "
            "strategy is a baseline, too"
        )
    leader = outcome.standing(outcome.winner) if outcome.winner else max(finalists, key=_mean_lead)
    found = _lead(leader, len(finalists))
    how = "beyond doubt" if outcome.margin is None else f"by more than {100 * outcome.margin:g} points"
    if outcome.winner:
        return f"{outcome.winner} beats {outcome.best}, the best of {baselines}, {how} on {fresh}: {found}"
    hopeless = outcome.margin is None and 0.5**outcome.second.contexts > outcome.level
    few = "; so few contexts cannot show any lead, ask more" if hopeless else ""
    tried = f"none of {_counted(len(finalists), 'finalist')} out of {_counted(many, 'candidate')}"
    return (
        f"fallback to {outcome.best}, the best of {baselines}: {tried} beats it {how} on {fresh}; the nearest is "
        f"{leader.name}, {found}{few}"
    )


def gap(selection: Selection) -> str:
    """What the report split says of the choice, in one sentence."""
    report, best = selection.report, selection.chosen.best
    asked = f"{_counted(report.asked.questions, 'question')} about {_contexts(report.asked)} of the report split"
    if report.gain is None:
        return f"on {asked} {best} scores {_percent(report.scores[best].mean)}"
    share = "no gap: the full cache is not above the best baseline"
    if report.share is not None:
        ends = " to ".join(
            "unbounded" if end is None else f"{100 * end:.0f}%" for end in (report.share.low, report.share.high)
        )
        share = f"{100 * report.share.mean:.0f}% of the gap to the full cache is recovered (95% interval {ends})"
    return f"{selection.chosen.winner} minus {best} on {asked}: {_points(report.gain)}; {share}"


def notes(selection: Selection) -> list[str]:
    """What is not as it was asked, or not of equal size, each once."""
    said = [note for outcome in selection.outcomes for note in outcome.notes] + list(selection.report.notes)
    return list(dict.fromkeys([*said, *([DECODE_ONLY] if _decodes_only(selection) else [])]))


def tables(selection: Selection) -> list[TextTable]:
    """Both stages of every phase setting, then the report."""
    found = [table for outcome in selection.outcomes for table in _stages(selection, outcome)]
    return [*found, _report_table(selection)]


def _stages(selection: Selection, outcome: Outcome) -> list[TextTable]:
    where = f"{selection.size.words}, {selection.protocol}, phases: {outcome.phases}"
    ranked = sorted(outcome.standings, key=lambda one: -one.first.mean)
    first = [[Cell(one.name), Cell(one.kind), Cell(_percent(one.first.mean))] for one in ranked[:SHOWN]]
    left = (f"{len(ranked) - SHOWN} more",) if len(ranked) > SHOWN else ()
    second = [
        [Cell(one.name, one.name == outcome.written), Cell(one.kind), Cell(_estimate(one.second)), *_lead_cells(one)]
        for one in outcome.standings
        if one.second is not None
    ]
    header = ["second stage", "kind", "score", f"minus {outcome.best} (won / tied / lost)", "chance", "accepted"]
    return [
        TextTable(
            f"first stage: {_asked(outcome.first)} ({where})",
            ["first stage", "kind", "score"],
            [Group("", first)],
            left,
        ),
        TextTable(f"second stage: {_asked(outcome.second)}", header, [Group("", second)], (decision(outcome),)),
    ]


def _report_table(selection: Selection) -> TextTable:
    report, chosen = selection.report, selection.chosen
    best = "best baseline, uniform" if chosen.best == selection.even else "best baseline"
    roles = {FULL: "no eviction", selection.even: "uniform", chosen.best: best}
    roles |= {chosen.winner: "winner"} if chosen.winner else {}
    rows = [
        [
            Cell(name, name == chosen.written), Cell(roles[name]), Cell(_estimate(score)),
            Cell(f"{report.held[name].entries:.0f}"), Cell(f"{report.held[name].most:.0f}"),
        ]
        for name, score in report.scores.items()
    ]  # fmt: skip
    header = ["report", "what it is", "score", "entries", "most entries"]
    title = f"report split: {_asked(report.asked)}, phases: {chosen.phases}"
    return TextTable(title, header, [Group("", rows)], (gap(selection), *notes(selection)))


def _lead_cells(one: Standing) -> list[Cell]:
    if one.lead is None or one.chance is None:
        return [Cell("")] * 3
    outcomes = f"{one.lead.wins} / {one.lead.ties} / {one.lead.losses}"
    return [Cell(f"{_points(one.lead)} {outcomes}"), Cell(f"{one.chance:.3f}"), Cell("yes" if one.accepted else "no")]


def _lead(one: Standing, finalists: int) -> str:
    if one.lead is None or one.chance is None:
        return "nothing"
    return f"{_points(one.lead)}, chance {one.chance:.3f} over {_counted(finalists, 'finalist')}"


def _mean_lead(one: Standing) -> float:
    return -1.0 if one.lead is None else one.lead.mean


def _points(found: Difference) -> str:
    return f"{100 * found.mean:+.2f} points [{100 * found.low:+.2f}, {100 * found.high:+.2f}]"


def _estimate(found: Estimate | None) -> str:
    return "" if found is None else f"{_percent(found.mean)} [{_percent(found.low)}, {_percent(found.high)}]"


def _percent(value: float) -> str:
    return f"{100 * value:.2f}"


def _asked(asked: Asked) -> str:
    return f"{_counted(asked.questions, 'question')} about {_contexts(asked)}"


def _contexts(asked: Asked) -> str:
    return _counted(asked.contexts, "context")


def _counted(number: int, noun: str) -> str:
    return f"{number} {noun}{'' if number == 1 else 's'}"


def _decodes_only(selection: Selection) -> bool:
    return any(outcome.phases == "decode" for outcome in selection.outcomes)
