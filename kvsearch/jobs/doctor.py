"""kvsearch doctor: is this installation able to do its work?"""

from __future__ import annotations

import os
import platform
from importlib.metadata import PackageNotFoundError, version
from typing import ClassVar

from kvsearch.config.options import Seeded
from kvsearch.jobs.groups import Loading
from kvsearch.jobs.public import job
from kvsearch.jobs.talk import Talk

PACKAGES = (
    "torch", "transformers", "accelerate", "datasets", "scikit-learn", "cma", "pandas", "safetensors", "typer",
    "pydantic",
)  # fmt: skip
EXTRAS = ("ray", "matplotlib", "lm-eval")
MISSING = "missing"


class DoctorOptions(Loading, Seeded):
    """How the bundled model is loaded."""

    job: ClassVar[str] = "doctor"


@job(DoctorOptions)
def doctor(options: DoctorOptions, talk: Talk) -> dict[str, str]:
    """Return versions, devices and what the bundled model answers; packages that are not there are "missing"."""
    facts = {"python": platform.python_version(), "kvsearch": version("kvsearch")}
    facts |= {name: _version(name) for name in (*PACKAGES, *EXTRAS)}
    facts |= {"devices": _devices(), "cores": str(os.cpu_count()), "offline": os.environ.get("HF_HUB_OFFLINE", "0")}
    if MISSING in facts.values():
        return facts
    from kvsearch.evaluation.answer import answer, example_for
    from kvsearch.models.loading import BUNDLED

    context, prompt, plain = example_for(BUNDLED, None, None, options.seed)
    reply = answer(options.load(BUNDLED, talk), None, context, prompt, plain, 3)
    return {**facts, "bundled model": f"answers {reply.text!r} from {reply.entries} entries"}


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return MISSING if package in PACKAGES else "not installed (optional)"


def _devices() -> str:
    import torch

    count = torch.cuda.device_count()
    return ", ".join(torch.cuda.get_device_name(index) for index in range(count)) if count else "cpu only"
