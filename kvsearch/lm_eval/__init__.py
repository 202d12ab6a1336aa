"""Tasks of lm-evaluation-harness under a plan.

Raises:
    EnvironmentFault: on import, where the harness, an optional package, is missing, too old, or lacks what it needs.
"""

from kvsearch.core.errors import EnvironmentFault

try:
    import lm_eval.tasks.manager  # noqa: F401
except ImportError as error:
    raise EnvironmentFault(
        f"lm-evaluation-harness cannot be imported ({error}): run `pip install kvsearch[lm-eval]`"
    ) from error
