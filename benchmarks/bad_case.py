"""One bad input, and what must become of it. Used by bad_inputs.py."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Literal


def nothing(folder: Path) -> None:
    """The preparation of a case that needs no file."""


@dataclass(frozen=True)
class Case:
    """name: unique and stable, "COMMAND/GROUP/WHAT". arguments: after `motet`; {folder} in them is the case's own.

    prepare: makes the case's files in its folder, which is empty. says: a pattern that what is said must match.
    """

    name: str
    arguments: tuple[str, ...]
    verdict: Literal["refuse", "accept"]
    prepare: Callable[[Path], None] = nothing
    says: str = ""
