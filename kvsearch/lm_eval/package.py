"""All that kvsearch uses of lm-evaluation-harness, an optional package.

Raises:
    EnvironmentFault: on import, where the package is missing, too old, or lacks what it needs itself.
"""

from __future__ import annotations

from kvsearch.errors import EnvironmentFault

try:
    from lm_eval import simple_evaluate
    from lm_eval.api.group import Group
    from lm_eval.api.instance import Instance
    from lm_eval.api.model import LM
    from lm_eval.api.task import Task
    from lm_eval.defaults import DEFAULT_OTHER_SEED, DEFAULT_RANDOM_SEED
    from lm_eval.models.utils import normalize_gen_kwargs, postprocess_generated_text
    from lm_eval.tasks.manager import TaskManager
    from lm_eval.utils import handle_non_serializable, make_table
except ImportError as error:
    raise EnvironmentFault(
        f"lm-evaluation-harness cannot be imported ({error}): run `pip install kvsearch[lm-eval]`"
    ) from error

__all__ = [
    "DEFAULT_OTHER_SEED",
    "DEFAULT_RANDOM_SEED",
    "LM",
    "Group",
    "Instance",
    "Task",
    "TaskManager",
    "handle_non_serializable",
    "make_table",
    "normalize_gen_kwargs",
    "postprocess_generated_text",
    "simple_evaluate",
]
