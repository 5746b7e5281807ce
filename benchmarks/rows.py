"""What a benchmark measured: rows with their goals, and the file that they are stored in."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]


@dataclass(frozen=True)
class Row:
    """goal: None where there is none. met: whether it is; where it is not given, the value is to be no more."""

    name: str
    value: float
    goal: float | None = None
    met: bool | None = None

    def __post_init__(self) -> None:
        if self.met is None:
            object.__setattr__(self, "met", self.goal is None or self.value <= self.goal)


def commit_of(tree: Path = ROOT) -> str:
    """The commit that a checkout is at; "" where git does not say."""
    command = ["git", "-C", str(tree), "rev-parse", "HEAD"]
    return subprocess.run(command, capture_output=True, text=True, check=False).stdout.strip()


def write_rows(path: Path, rows: Sequence[Row], **about: Any) -> None:
    """Write rows that were measured on CPUs, at this commit, as JSON. about: what else is stored beside them."""
    document = {"commit": commit_of(), "device": "cpu", "emulated": False, **about}
    document["rows"] = [asdict(row) for row in rows]
    path.write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")
