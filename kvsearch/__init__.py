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
    from kvsearch.core.errors import KvsearchError
    from kvsearch.jobs import plan as plans
    from kvsearch.jobs.bench import bench
    from kvsearch.jobs.calibrate import calibrate
    from kvsearch.jobs.evaluate import evaluate, headroom
    from kvsearch.jobs.evolve import evolve
    from kvsearch.jobs.export import export, export_to
    from kvsearch.jobs.generate import compress, generate
    from kvsearch.jobs.listings import doctor
    from kvsearch.jobs.lm_eval import run_lm_eval
    from kvsearch.jobs.report import show, verify, write_report
    from kvsearch.jobs.reproduce import reproduce
    from kvsearch.jobs.run import run
    from kvsearch.jobs.select import select
    from kvsearch.jobs.validate import validate
    from kvsearch.plan import Plan, Profile, load_plan
    from kvsearch.plan.profile import load_profile
    from kvsearch.runtime import PlanCache, attach

    __version__: str

# resolved on first use, so that `import kvsearch` stays light
_HOMES = {
    "KvsearchError": "kvsearch.core.errors", "Plan": "kvsearch.plan", "PlanCache": "kvsearch.runtime",
    "Profile": "kvsearch.plan", "attach": "kvsearch.runtime", "load_plan": "kvsearch.plan",
    "export_to": "kvsearch.jobs.export", "load_profile": "kvsearch.plan.profile",
    "compress": "kvsearch.jobs.generate", "doctor": "kvsearch.jobs.listings", "headroom": "kvsearch.jobs.evaluate",
    "run_lm_eval": "kvsearch.jobs.lm_eval",
    "show": "kvsearch.jobs.report", "verify": "kvsearch.jobs.report", "write_report": "kvsearch.jobs.report",
    **{
        verb: f"kvsearch.jobs.{verb}"
        for verb in (
            "bench", "calibrate", "evaluate", "evolve", "export", "generate", "reproduce", "run", "select", "validate",
        )
    },
}  # fmt: skip

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
        return import_module("kvsearch.jobs.plan")
    if name in _HOMES:
        return getattr(import_module(_HOMES[name]), name)
    raise AttributeError(f"module 'kvsearch' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted(__all__)
