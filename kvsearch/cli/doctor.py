"""kvsearch doctor: is this installation able to do its work?"""

from __future__ import annotations

import os
import platform
from importlib.metadata import PackageNotFoundError, version

from kvsearch.cli.common import Common, command

PACKAGES = (
    "torch",
    "transformers",
    "accelerate",
    "datasets",
    "scikit-learn",
    "cma",
    "pandas",
    "safetensors",
    "typer",
    "pydantic",
)
EXTRAS = ("ray", "matplotlib", "lm-eval")


@command
def doctor(common: Common) -> None:
    """Check versions, devices and the bundled model, and run one tiny generation on the runtime's cache."""
    from kvsearch.errors import EnvironmentFault

    facts = {"python": platform.python_version(), "kvsearch": version("kvsearch")}
    facts |= {name: _version(name) for name in (*PACKAGES, *EXTRAS)}
    facts |= {"devices": _devices(), "cores": str(os.cpu_count()), "offline": os.environ.get("HF_HUB_OFFLINE", "0")}
    missing = [name for name in PACKAGES if facts[name] == "missing"]
    if not missing:
        facts["bundled model"] = _try_bundled(common)
    if common.as_json:
        common.print_json(facts)
    else:
        width = max(map(len, facts))
        for name, value in facts.items():
            common.out.print(f"{name:<{width}}  {value}", markup=False)
    if missing:
        raise EnvironmentFault(f"{', '.join(missing)} missing: run `pip install -e .` again where kvsearch is")


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return "missing" if package in PACKAGES else "not installed (optional)"


def _devices() -> str:
    import torch

    count = torch.cuda.device_count()
    return ", ".join(torch.cuda.get_device_name(index) for index in range(count)) if count else "cpu only"


def _try_bundled(common: Common) -> str:
    from kvsearch.evaluation.answer import answer, example_for
    from kvsearch.models.loading import BUNDLED

    context, prompt, plain = example_for(BUNDLED, None, None, common.seed)
    reply = answer(common.load(BUNDLED), None, context, prompt, plain, 3)
    return f"answers {reply.text!r} from {reply.entries} entries"
