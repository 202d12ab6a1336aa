"""Write the bundled calibration data:  python scripts/bundled_calibration.py > data/calibration/bundled.json"""

from __future__ import annotations

import json
import random
import sys
from typing import Any

from kvsearch.tasks.synthetic.suite import SUITES, SyntheticTask

LENGTH = 1024
CONTEXTS_PER_TASK = 2


def calibration_file(seed: int = 0) -> dict[str, Any]:
    """Make two contexts of every core task and about 30 questions, in the format of `kvsearch.calibration.data`."""
    contexts = []
    for name in SUITES["core"]:
        rng = random.Random(f"calibrate/{name}/{LENGTH}/{seed}")
        for _ in range(CONTEXTS_PER_TASK):
            document = SyntheticTask(name, LENGTH, "calibrate").document(rng)
            pairs = [
                {"question": q.question, "answer": q.answers[0]}
                for q in document.questions[: 3 if name not in ("vote", "single") else 1]
            ]
            contexts.append({"kind": name, "text": " ".join(document.words[1:]), "questions": pairs})
    return {"name": "bundled", "prompt": SyntheticTask.prompt, "contexts": contexts}


if __name__ == "__main__":
    json.dump(calibration_file(), sys.stdout, indent=1)
    sys.stdout.write("\n")
