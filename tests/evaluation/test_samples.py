"""The file of all replies."""

from __future__ import annotations

import csv
from dataclasses import asdict, fields, replace
from pathlib import Path

from kvsearch.evaluation.samples import Sample, write_samples

ONE = Sample(
    "qa", "c", "plan", "question-aware", "0-1", 2, 'he said "a, b"\nand left', 0.25, "ab12", True, 100, 120, 7,
    40, 1024.5, 47, 0.125, 0.5,
)  # fmt: skip
TWO = replace(ONE, reply="", score=1.0, truncated=False)


def test_csv(tmp_path: Path) -> None:
    write_samples([ONE, TWO], tmp_path / "samples.csv")
    data = (tmp_path / "samples.csv").read_bytes()
    assert b"\r" not in data
    with (tmp_path / "samples.csv").open(newline="") as file:
        rows = list(csv.DictReader(file))
    assert list(rows[0]) == [field.name for field in fields(Sample)]
    assert rows[0] == {name: str(value) for name, value in asdict(ONE).items()}
    assert rows[1]["reply"] == ""
