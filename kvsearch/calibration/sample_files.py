"""The samples that a calibration has finished, in files by batch and continuation."""

from __future__ import annotations

import re
from pathlib import Path

SAMPLES = "samples"  # folder of a PolyKV calibration: what is finished of it
_NAME = re.compile(r"\d{6,}-\d{4,}\.safetensors")


def sample_files(folder: Path) -> list[Path]:
    """Return what a calibration has written into its folder of samples; whatever else is there is not ours."""
    return sorted(path for path in folder.glob("*.safetensors") if _NAME.fullmatch(path.name))


def has_samples(directory: Path) -> bool:
    """Tell whether samples of a calibration that is not finished are in `directory`."""
    return bool(sample_files(directory / SAMPLES))
