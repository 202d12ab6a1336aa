"""What the stages of a paper's table cost, as far as that is known before a model is loaded."""

from __future__ import annotations

import math
from typing import Any

from kvsearch.jobs.reproduce_stages import MADE, REPORT, SELECTION, Stages
from kvsearch.papers.table import Stage
from kvsearch.plan.saved import PROFILE

FINISHED = {"calibrate": PROFILE, "evolve": REPORT, "evaluate": REPORT, "select": SELECTION}  # the last file


def told(stages: Stages, stage: Stage) -> dict[str, Any]:
    """Return what a stage does, whether it is finished, and what it costs."""
    place = stages.place(stage)
    done = stage.job != "validate" and (place / FINISHED.get(stage.job, "")).exists()
    state = "finished" if done else "begun" if place.exists() else "to do"
    said = {"name": stage.name, "job": stage.job, "what": stage.words, "kept": str(place)}
    return {**said, "state": state, **cost(stages, stage)}


def cost(stages: Stages, stage: Stage) -> dict[str, int]:
    """Return the work of a stage, at most: contexts and tokens that are read, replies, candidates of a search."""
    if stage.job in MADE:
        return {}
    if stage.job == "calibrate":
        return _of_calibration(stages, stage)
    tasks, asked = len(stages.tasks_of(stage)), stage.options
    splits = {"evolve": 3, "select": 2}.get(stage.job, 1)
    contexts = splits * tasks * asked["samples"]
    length = max(asked.get("length") or (stage.tokens,))
    found = {"contexts": contexts} | ({"tokens": contexts * length} if length else {})
    if stage.job == "evaluate":
        sizes = len(f"{asked.get('budgets', '')},{asked.get('ratios', '')}".strip(",").split(","))
        return {**found, "replies": contexts * (1 + sizes * len(stage.methods) + len(asked.get("plan", ())))}
    if stage.job == "evolve":
        group = asked["group_size"]
        population = 4 + math.floor(3 * math.log(group))
        return {**found, "layers_of_a_group": group, "candidates_of_a_group": population * asked["generations"]}
    return found


def _of_calibration(stages: Stages, stage: Stage) -> dict[str, int]:
    from kvsearch.calibration.data import default_data, load_calibration_data

    texts = load_calibration_data(default_data(stages.options.model)).limited(stage.options.get("questions"))
    patterns = stage.options.get("patterns", ())
    many = {"patterns": 9 if patterns == "paper" else len(patterns)} if patterns else {}
    return {"contexts": len(texts.contexts), "questions": texts.questions, **many}


def work(stages: Stages) -> dict[str, float]:
    """Return about how long stages take, beside each other, by their names."""
    found = {}
    for stage in stages.all:
        known = cost(stages, stage)
        searched = known.get("candidates_of_a_group", 0) * known.get("contexts", 0) / 10
        measured = 5 * known.get("questions", 0) * known.get("patterns", 1)
        found[stage.name] = 1.0 + measured + max(known.get("replies", 0), searched, 10 * known.get("contexts", 0))
    return found
