"""Names of plans that searches compare, and of the files that they write; reports need them, and nothing that searches.

best.json      the best plan so far
report.json    the result, as `--json` prints it
plan.json      the plan
front.json     the results of several budgets, with plan-BUDGET.json of each
choice, report folders of replies
"""

from __future__ import annotations

from kvsearch.runs.identity import CONTEXTS, REPORT

BEST = "best.json"
PLAN = "plan.json"
FRONT = "front.json"
FILES = (BEST, REPORT, PLAN, FRONT, CONTEXTS, "plan-*.json", "choice", "choice-*", "report")

EVOLVED = "evolved"
EXPANDED = "expanded"  # the plan of the smallest budget, scaled
# start plans that are made of no other
UNIFORM = "uniform"
PYRAMID = "pyramid"
STREAMING = "streaming"
