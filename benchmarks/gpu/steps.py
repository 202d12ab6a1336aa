"""What the scripts of this folder share: steps, each in a process of its own with a limit of time, and their results.

    python benchmarks/gpu/correctness.py [--out benchmarks/gpu/results] [--device auto] [--small] [--only STEP]

Every step writes a small JSON file, OUT/SCRIPT-STEP.json: what it found or why it failed; the next one goes on. The
first step says what is installed. `--small` is for machines without a GPU: small shapes, kernels in Triton's
interpreter. The device "fakegpu:0" is the stand-in of tests/torture/device.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
RESULTS = ROOT / "benchmarks" / "gpu" / "results"
PACKAGES = ("kvsearch", "torch", "triton", "transformers", "accelerate", "flashinfer-python")
KEPT = 2000  # characters of what a step said before it failed
SLOWER = 5  # times that small shapes may take as long, in the interpreter
SHOWN = 1500  # characters of a result that are printed


@dataclass(frozen=True)
class Settings:
    """Where a step runs, and how large its shapes are."""

    device: str
    small: bool = False

    @property
    def shape(self) -> str:
        """The shape of models with random weights."""
        return "small" if self.small else "llama-3.1-8b"

    @property
    def kernels(self) -> str:
        """The device that kernels run on: without CUDA the CPU, in Triton's interpreter."""
        return self.device if self.device.startswith("cuda") else "cpu"

    def serving(self) -> AbstractContextManager[Any]:
        """Let kernels serve tensors on `kernels`, for a while."""
        from tests.kernels.serving import interpreted

        return interpreted() if self.kernels == "cpu" else nullcontext()


@dataclass(frozen=True)
class Step:
    """What is measured, as JSON, and the seconds that it may take."""

    action: Callable[[Settings], Any]
    seconds: int


def main(doc: str | None, minutes: float, steps: Mapping[str, Step]) -> None:
    """Run the steps of a script one after the other, `minutes` at most in all, or `--only` one of them here."""
    parser = argparse.ArgumentParser(description=doc, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=RESULTS, help="folder of the results")
    parser.add_argument("--device", default="auto", help="auto: cuda:0 where there is one, else cpu")
    parser.add_argument("--small", action="store_true", help="small shapes, for machines without a GPU")
    parser.add_argument("--only", choices=["versions", *steps], help="one step, in this process, without a limit")
    args = parser.parse_args()
    every = {"versions": Step(versions, 60), **steps}
    script = Path(sys.argv[0]).stem
    args.out.mkdir(parents=True, exist_ok=True)
    if args.only is not None:
        found = every[args.only].action(settings(args.device, args.small))
        write(args.out / f"{script}-{args.only}.json", found)
        return
    patience = SLOWER if args.small else 1
    end = time.monotonic() + patience * 60 * minutes
    for name, step in every.items():
        limit = min(patience * step.seconds, end - time.monotonic())
        path = args.out / f"{script}-{name}.json"
        path.unlink(missing_ok=True)
        started = time.monotonic()
        if limit <= 0:
            write(path, {"failed": "no time was left"})
        else:
            code, said = run([sys.executable, *sys.argv, "--only", name], limit)
            if code is None:
                write(path, {"failed": f"it took more than {limit:.0f} s: {said}"})
            elif code:
                write(path, {"failed": f"exit code {code}: {said}"})
        seconds = time.monotonic() - started
        print(f"== {script} {name}, {seconds:.0f} s: {json.dumps(json.loads(path.read_text()))[:SHOWN]}", flush=True)


def run(command: Sequence[str], limit: float) -> tuple[int | None, str]:
    """Run a command, `limit` seconds at most; return its exit code (None: it took longer) and what it said."""
    paths = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
    environment = {**os.environ, "PYTHONPATH": paths}
    process = subprocess.Popen(
        command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, start_new_session=True
    )
    try:
        said, _ = process.communicate(timeout=limit)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)  # and what it has started
        said, _ = process.communicate()
        return None, said[-KEPT:]
    return process.returncode, said[-KEPT:]


def settings(device: str, small: bool) -> Settings:
    """Return where steps run; the stand-in is made known to torch, and a small shape to `random_model`."""
    from kvsearch.models import shapes

    shapes.SHAPES["small"] = {
        **shapes.LLAMA, "hidden_size": 64, "intermediate_size": 224, "num_hidden_layers": 2, "num_attention_heads": 4,
        "num_key_value_heads": 2, "vocab_size": 512,
    }  # fmt: skip
    if device.startswith("fakegpu"):
        from tests.torture.device.accelerator import backend

        backend()
    return Settings(("cuda:0" if cuda() else "cpu") if device == "auto" else device, small)


def cuda() -> bool:
    import torch

    return torch.cuda.is_available()


os.environ["TRITON_INTERPRET"] = "0" if cuda() else "1"  # Triton reads it when it is imported


def write(path: Path, found: Any) -> None:
    path.write_text(json.dumps(found, indent=1) + "\n")


def said_by(*command: str, seconds: float = 30) -> str:
    """Return what a command says, or why there is nothing."""
    if shutil.which(command[0]) is None:
        return "not installed"
    code, said = run(command, seconds)
    return f"it took more than {seconds:.0f} s: {said}" if code is None else said.strip()


def versions(where: Settings) -> dict[str, Any]:
    """What is installed, and what the device is."""
    import torch

    found = {"python": platform.python_version(), "cuda": torch.version.cuda, "device": where.device}
    for name in PACKAGES:
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            found[name] = "not installed"
    found["nvidia-smi"] = said_by(
        "nvidia-smi", "--query-gpu=name,driver_version,memory.total,memory.free,clocks.max.sm", "--format=csv,noheader"
    )
    found["compute-sanitizer"] = said_by("compute-sanitizer", "--version")
    if where.device.startswith("cuda"):
        found["name"] = torch.cuda.get_device_name(where.device)
        found["capability"] = ".".join(map(str, torch.cuda.get_device_capability(where.device)))
    return found


def benched(where: Settings, sizes: Sequence[Mapping[str, Any]], **options: Any) -> dict[str, Any]:
    """Return what `bench` finds at the first of some sizes for which there is memory; one round, skewed budgets."""
    from kvsearch.core.errors import EnvironmentFault
    from kvsearch.jobs.bench import BenchOptions, bench, dry_run
    from kvsearch.jobs.public import run_job

    given = {**options, "shape": where.shape, "device": where.device, "skewed": True, "rounds": 1}
    for number, size in enumerate(sizes, 1):
        checked = BenchOptions.of(**given, **size)
        try:
            run_job(dry_run, checked, dry=True)
        except EnvironmentFault:
            if number == len(sizes):
                raise
        else:
            return bench(checked).as_json()
    raise ValueError("no sizes were given")


def seconds_of(action: Callable[[], object], where: Settings) -> float:
    """Return the seconds of an action, a median: captured and replayed on CUDA, of a few calls elsewhere."""
    if where.kernels.startswith("cuda"):
        import torch
        from triton.testing import do_bench_cudagraph

        action()  # compiled before it is captured
        with torch.cuda.device(where.kernels), torch.cuda.stream(torch.cuda.Stream()):  # type: ignore[no-untyped-call]
            return float(do_bench_cudagraph(action, return_mode="median")) / 1e3
    taken = []
    for _ in range(1 if where.small else 3):
        start = time.perf_counter()
        action()
        taken.append(time.perf_counter() - start)
    return sorted(taken)[len(taken) // 2]
