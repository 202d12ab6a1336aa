"""What a calibration that is not finished has kept: files by batch and continuation, or by stage and step."""

from __future__ import annotations

import re
from pathlib import Path

from kvsearch.plan.temporary import TEMPORARY

SAMPLES = "samples"  # folder of a calibration: what is finished of it
_NAME = re.compile(r"\d{6,}-\d{4,}\.safetensors")


def sample_files(folder: Path) -> list[Path]:
    """Return what a calibration has written into its folder of samples; whatever else is there is not ours."""
    return sorted(path for path in folder.glob("*.safetensors") if _NAME.fullmatch(path.name))


def has_samples(directory: Path) -> bool:
    """Tell whether samples of a calibration that is not finished are in `directory`."""
    return bool(sample_files(directory / SAMPLES))


def forget_samples(directory: Path) -> None:
    """Remove the samples of a calibration in `directory`, and nothing else."""
    folder = directory / SAMPLES
    for path in [*sample_files(folder), *folder.glob(f"{TEMPORARY}*")]:
        path.unlink()
    if folder.is_dir() and not any(folder.iterdir()):
        folder.rmdir()
