"""kvsearch: offline calibration and strategy search for KV-cache eviction in language models.

The verbs of the command line are functions here, with the same options as keywords:

    profile = kvsearch.calibrate("bundled", output="runs/snapkv", questions=8)
    plan = kvsearch.export("runs/snapkv", ratio=0.8, output="plan.json")
    result = kvsearch.evaluate("bundled", plan="plan.json", tasks=["niah"], samples=5)
    with kvsearch.attach(model, plan) as planned:
        planned.generate(...)  # runs on the smaller cache

Examples:
    Calibration measures a profile; a plan says how many entries each KV head keeps, here 64 in 6 layers of 4 heads.

    >>> import kvsearch
    >>> run = kvsearch.calibrate("bundled", output="runs/queries", method="query_statistics", questions=2)
    >>> profile = kvsearch.load_profile("runs/queries/profile.safetensors")
    >>> profile.metadata.model.layers
    6
    >>> plan = kvsearch.plans.uniform("bundled", policy="snapkv", budget=64, output="plan.json")
    >>> kvsearch.load_plan("plan.json").total
    1536

    The size of a plan is a number of entries per KV head or the share of the prompt to evict.

    >>> from kvsearch.plan import Size
    >>> Size(budget=64).words, Size(ratio=0.8).words
    ('64 entries per kv head', '80% evicted')

    Other programs run exported plans, `transformers` among them; tasks are found by name.

    >>> sorted(kvsearch.export_to("plan.json", to="custom-generate", output="decoder").files)
    ['README.md', 'custom_generate/generate.py', 'custom_generate/requirements.txt', 'plan.json']
    >>> from kvsearch.tasks.catalog import find_tasks
    >>> [task.lengths for task in find_tasks("niah", {"length": (500,)})]
    [(500,)]

    Every error that a caller can mend is a `KvsearchError`, with one line that says how.

    >>> kvsearch.load_plan("absent.json")
    Traceback (most recent call last):
        ...
    kvsearch.core.errors.UsageError: there is no file absent.json: check the path
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from kvsearch.commands import plan as plans
    from kvsearch.commands.bench import bench
    from kvsearch.commands.calibrate import calibrate
    from kvsearch.commands.evaluate import evaluate, headroom
    from kvsearch.commands.evolve import evolve
    from kvsearch.commands.export import export, export_to
    from kvsearch.commands.generate import compress, generate
    from kvsearch.commands.listings import doctor
    from kvsearch.commands.lm_eval import run_lm_eval
    from kvsearch.commands.report import show, verify, write_report
    from kvsearch.commands.reproduce import reproduce
    from kvsearch.commands.run import run
    from kvsearch.commands.select import select
    from kvsearch.commands.validate import validate
    from kvsearch.core.errors import KvsearchError
    from kvsearch.plan import Plan, Profile, load_plan
    from kvsearch.plan.profile import load_profile
    from kvsearch.runtime import PlanCache, attach

    __version__: str

# resolved on first use, so that `import kvsearch` stays light
_HOMES = {
    "KvsearchError": "kvsearch.core.errors",
    "Plan": "kvsearch.plan",
    "PlanCache": "kvsearch.runtime",
    "Profile": "kvsearch.plan",
    "attach": "kvsearch.runtime",
    "load_plan": "kvsearch.plan",
    "load_profile": "kvsearch.plan.profile",
    "bench": "kvsearch.commands.bench",
    "calibrate": "kvsearch.commands.calibrate",
    "compress": "kvsearch.commands.generate",
    "doctor": "kvsearch.commands.listings",
    "evaluate": "kvsearch.commands.evaluate",
    "evolve": "kvsearch.commands.evolve",
    "export": "kvsearch.commands.export",
    "export_to": "kvsearch.commands.export",
    "generate": "kvsearch.commands.generate",
    "headroom": "kvsearch.commands.evaluate",
    "reproduce": "kvsearch.commands.reproduce",
    "run": "kvsearch.commands.run",
    "run_lm_eval": "kvsearch.commands.lm_eval",
    "select": "kvsearch.commands.select",
    "show": "kvsearch.commands.report",
    "validate": "kvsearch.commands.validate",
    "verify": "kvsearch.commands.report",
    "write_report": "kvsearch.commands.report",
}

__all__ = [
    "KvsearchError", "Plan", "PlanCache", "Profile", "__version__", "attach", "bench", "calibrate", "compress",
    "doctor", "evaluate", "evolve", "export", "export_to", "generate", "headroom", "load_plan", "load_profile", "plans",
    "reproduce", "run", "run_lm_eval", "select", "show", "validate", "verify", "write_report",
]  # fmt: skip


def __getattr__(name: str) -> Any:
    if name == "__version__":
        from importlib.metadata import version

        return version("kvsearch")
    if name == "plans":
        return import_module("kvsearch.commands.plan")
    if name in _HOMES:
        return getattr(import_module(_HOMES[name]), name)
    raise AttributeError(f"module 'kvsearch' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted(__all__)
