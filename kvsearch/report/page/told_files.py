"""What a plan and a profile say, in a sentence each."""

from __future__ import annotations

from collections import Counter

import numpy as np

from kvsearch.calibration.analysis import ranking_gap, stability
from kvsearch.plan import PHASES, Plan, Profile
from kvsearch.plan.profile import QUERIES
from kvsearch.plan.schema import STATIC
from kvsearch.policies.registry import FITTED
from kvsearch.report.dynamic import is_dynamic
from kvsearch.report.dynamic import remarks as dynamic_remarks
from kvsearch.report.lukv import LukvView, choice_lines
from kvsearch.report.numbers import counted, percent
from kvsearch.report.page.story import Story, sentence
from kvsearch.report.ranking import RankingView
from kvsearch.report.signals import FULL, PREFERRED
from kvsearch.signals.table import SignalTable

RATIO = 0.8  # at which a profile is shown, as `kvsearch show` does


def plan_story(plan: Plan) -> Story:
    """Return what a plan keeps."""
    parts = [(phase, part) for phase in PHASES["both"] if (part := getattr(plan, phase)) is not None]
    each = [count for layer in parts[0][1].budgets if layer is not None for count in layer]
    low, high = min(each), max(each)
    spread = f"{low} in every head" if low == high else f"{np.mean(each):.1f} per kv head, from {low} to {high}"
    of = f" of a prompt of {plan.length:,} tokens" if plan.length else ""
    remarks = []
    for phase, part in parts:
        names = Counter(layer.policy.name for layer in part.layers if layer is not None)
        listed = (f"{name} in {counted(many, 'layer')}" for name, many in names.items())
        remarks.append(f"{phase}: {', '.join(listed)}")
    if plan.allocation.name != STATIC:
        remarks.append(f"{plan.allocation.name} shares the entries out anew for every prompt")
    asked = "What does every layer and kv head keep, and by which policy?"
    return Story(asked, f"{plan.total:,} entries{of}: {spread}.", tuple(remarks))


def profile_story(profile: Profile) -> Story:
    """Return what a calibration found out."""
    told = profile.metadata
    asked = (
        f"Which entries can {told.model.name} live without? {told.method}, {counted(told.questions, 'question')}, "
        f"contexts of {told.length:,} tokens"
    )
    if told.method in FITTED:
        return _ranking(RankingView(profile), asked)
    if told.method == QUERIES:
        return Story(asked, f"Where the queries of {counted(len(told.layers), 'layer')} lie, and how they spread.")
    if told.signals is not None:
        return _signals(SignalTable(profile), asked)
    if is_dynamic(profile):
        *others, last = dynamic_remarks(profile)
        return Story(asked, sentence(last), tuple(others))
    return _lukv(profile, asked)


def _lukv(profile: Profile, asked: str) -> Story:
    if not has_importance(profile):
        local = profile.local_ratios(RATIO)
        return Story(asked, f"With {percent(RATIO, 0)}% evicted, heads lose {local.min():.0%} to {local.max():.0%}.")
    lost = {name: float(loss.sum()) for name, loss in LukvView(profile, RATIO).losses.items()}
    own, even = percent(lost[profile.metadata.method], 1), percent(lost["uniform"], 1)
    remarks = [
        f"recall lost to the oracle's ranking, mean over heads: {ranking_gap(profile).mean():.3f}",
        f"local ratios at {RATIO:g}: {stability(profile, RATIO).verdict}",
        *choice_lines(profile),
    ]
    budgets = f"With {percent(RATIO, 0)}% evicted, measured budgets lose {own}% of the importance of the context"
    return Story(asked, f"{budgets}, even ones {even}%.", tuple(remarks))


def has_importance(profile: Profile) -> bool:
    """Tell whether a profile has more than its table: what importance every head keeps at every budget."""
    return {"mass", "recall", "oracle_recall", "question_ratio"} <= profile.arrays.keys()


def _ranking(view: RankingView, asked: str) -> Story:
    better, others = view.loses_to(), len(view.settings["rankings"]) - 1
    found = f"ranks better than all {others} others" if better is None else f"does not rank better than {better}"
    method = view.profile.metadata.method
    return Story(asked, f"The fitted {method} {found} on contexts that it never saw.", tuple(view.remarks()))


def _signals(table: SignalTable, asked: str) -> Story:
    """Say which pattern most layers prefer, by the first of the paper's signals that was measured."""
    axes, route = table.axes, next((name for name in PREFERRED if name in table.routes), None)
    explosions = [one for phase in axes.phases for at in axes.budgets for one in table.explosions(phase, at)]
    remarks = tuple(dict.fromkeys(one.words for one in explosions))
    if route is None:
        return Story(asked, "Only the entropy of attention was measured.", remarks)
    phase, budget = axes.phases[0], axes.budgets[0]
    rivals = [at for at, name in enumerate(table.patterns) if name != FULL]
    best = table.preference(route, phase, budget)[:, rivals].argmax(1)
    (name, layers), *_ = Counter(table.patterns[rivals[at]] for at in best).most_common()
    where = f"in {phase} at {budget} entries per kv head"
    return Story(asked, f"By {route}, {name} is best for {layers} of {counted(len(best), 'layer')} {where}.", remarks)
