"""kvsearch doctor: is this installation able to do its work?"""

from __future__ import annotations

from kvsearch.cli.command import command
from kvsearch.cli.console import Console
from kvsearch.jobs.doctor import MISSING, DoctorOptions


@command(DoctorOptions)
def doctor(options: DoctorOptions, console: Console) -> None:
    """Check versions, devices and the bundled model, and run one tiny generation on the runtime's cache."""
    from kvsearch.errors import EnvironmentFault
    from kvsearch.jobs import doctor as jobs

    facts = jobs.doctor(options, talk=console)
    if console.as_json:
        console.print_json(facts)
    else:
        width = max(map(len, facts))
        for name, value in facts.items():
            console.out.print(f"{name:<{width}}  {value}", markup=False)
    missing = [name for name, value in facts.items() if value == MISSING]
    if missing:
        raise EnvironmentFault(f"{', '.join(missing)} missing: run `pip install -e .` again where kvsearch is")
