"""kvsearch doctor: is this installation able to do its work?"""

from __future__ import annotations

import os
import platform
from dataclasses import asdict
from importlib.metadata import PackageNotFoundError, version
from typing import Annotated, Any, ClassVar

from kvsearch.config.options import Option, Seeded
from kvsearch.jobs.groups import Loading
from kvsearch.jobs.public import job
from kvsearch.jobs.talk import Talk
from kvsearch.progress import counted

PACKAGES = (
    "torch", "transformers", "accelerate", "datasets", "scikit-learn", "cma", "pandas", "safetensors", "typer",
    "pydantic",
)  # fmt: skip
EXTRAS = ("ray", "matplotlib", "lm-eval")
MISSING = "missing"


class DoctorOptions(Loading, Seeded):
    """How the bundled models are loaded, and what is looked at."""

    job: ClassVar[str] = "doctor"

    families: Annotated[
        bool, Option("Run a tiny random model of every tested family under plans, and say how each does.")
    ] = False


@job(DoctorOptions)
def doctor(options: DoctorOptions, talk: Talk) -> dict[str, Any]:
    """Return versions, devices and what the bundled models answer; packages that are not there are "missing".

    With `families`: the same versions and, instead of an answer, "families", a list of the fields of `FamilyReport`.
    """
    facts = {"python": platform.python_version(), "kvsearch": version("kvsearch")}
    facts |= {name: _version(name) for name in (*PACKAGES, *EXTRAS)}
    facts |= {"devices": _devices(), "cores": str(os.cpu_count()), "offline": os.environ.get("HF_HUB_OFFLINE", "0")}
    if MISSING in facts.values():
        return facts
    if options.families:
        return {**facts, "families": _families(talk)}
    from kvsearch.evaluation.answer import answer
    from kvsearch.models.loading import BUNDLED
    from kvsearch.tasks.given import example_for

    for name in BUNDLED:
        context, prompt, plain = example_for(name, None, None, options.seed)
        (reply,) = answer(options.load(name, talk), None, context, [prompt], plain, 3)
        facts[f"{name} model"] = f"answers {reply.text!r} from {reply.entries} entries"
    return facts


def _families(talk: Talk) -> list[dict[str, str]]:
    from kvsearch.models.families import FAMILIES
    from kvsearch.runtime.family_check import check_family

    with talk.loading("tiny models"), talk.progress("families") as progress:
        return [asdict(check_family(name)) for name in counted(FAMILIES, len(FAMILIES), progress)]


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return MISSING if package in PACKAGES else "not installed (optional)"


def _devices() -> str:
    import torch

    count = torch.cuda.device_count()
    return ", ".join(torch.cuda.get_device_name(index) for index in range(count)) if count else "cpu only"
