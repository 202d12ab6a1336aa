"""kvsearch doctor: is this installation able to do its work?"""

from __future__ import annotations

import os
import platform
from importlib.metadata import PackageNotFoundError, version
from typing import Any

from kvsearch.config.options import Seeded
from kvsearch.jobs.groups import Loading
from kvsearch.jobs.public import job
from kvsearch.jobs.reporter import Reporter
from kvsearch.models.loading import BUNDLED
from kvsearch.tasks.given import example_for

PACKAGES = (
    "torch", "transformers", "accelerate", "datasets", "scikit-learn", "cma", "pandas", "safetensors", "typer",
    "pydantic",
)  # fmt: skip
EXTRAS = ("ray", "lm-eval")
MISSING = "missing"


class DoctorOptions(Loading, Seeded):
    """How the bundled models are loaded."""


@job(DoctorOptions)
def doctor(options: DoctorOptions, reporter: Reporter) -> dict[str, Any]:
    """Return versions, devices and what the bundled models answer; packages that are not there are "missing"."""
    import torch

    facts = {"python": platform.python_version(), "kvsearch": version("kvsearch")}
    for name in (*PACKAGES, *EXTRAS):
        try:
            facts[name] = version(name)
        except PackageNotFoundError:
            facts[name] = MISSING if name in PACKAGES else "not installed (optional)"
    devices = [torch.cuda.get_device_name(index) for index in range(torch.cuda.device_count())]
    facts |= {
        "devices": ", ".join(devices) or "cpu only",
        "cores": str(os.cpu_count()),
        "offline": os.environ.get("HF_HUB_OFFLINE", "0"),
    }
    if MISSING in facts.values():
        return facts
    from kvsearch.evaluation.answer import answer

    for name in BUNDLED:
        context, prompt, plain = example_for(name, None, None, options.seed)
        (reply,) = answer(options.load(name, reporter), None, context, [prompt], plain, 3)
        facts[f"{name} model"] = f"answers {reply.text!r} from {reply.entries} entries"
    return facts
