"""List the numbers that README and docs claim, with the commands that make them (claims.yaml).

python scripts/claims.py              # all claims: name, file, command; exit 1 where one no longer stands in its file
python scripts/claims.py --run NAME   # give the commands of a claim, in the shell, to compare by eye
"""

from __future__ import annotations

import argparse
import subprocess
import sys
from pathlib import Path
from typing import Any

import yaml

ROOT = Path(__file__).resolve().parent.parent
CLAIMS = Path(__file__).with_suffix(".yaml")


def read_claims() -> dict[str, dict[str, Any]]:
    """Return the claims by name: `file`, `claim` (text or texts that stand in it), `command` (lines of shell)."""
    claims: dict[str, dict[str, Any]] = yaml.safe_load(CLAIMS.read_text(encoding="utf-8"))
    return claims


def missing_texts(claim: dict[str, Any]) -> list[str]:
    """Return the texts of a claim that its file does not have; breaks of lines do not count."""
    page = " ".join((ROOT / claim["file"]).read_text(encoding="utf-8").split())
    texts = claim["claim"] if isinstance(claim["claim"], list) else [claim["claim"]]
    return [text for text in texts if " ".join(text.split()) not in page]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--run", metavar="NAME", help="give the commands of this claim, in a directory of their own")
    asked = parser.parse_args()
    claims = read_claims()
    if asked.run is not None:
        if asked.run not in claims:
            sys.exit(f"no claim is called {asked.run}: {', '.join(claims)}")
        print(claims[asked.run]["claim"])
        sys.exit(subprocess.run(["bash", "-exc", claims[asked.run]["command"]], cwd=ROOT, check=False).returncode)
    lost = 0
    for name, claim in claims.items():
        print(f"{name} ({claim['file']})\n    " + claim["command"].strip().replace("\n", "\n    "))
        for text in missing_texts(claim):
            print(f"    GONE: {text}")
            lost += 1
    sys.exit(1 if lost else 0)


if __name__ == "__main__":
    main()
