"""The families of whole models, by the type that their config.json names."""

from __future__ import annotations

from motet.models.whole.family import WholeFamily
from motet.models.whole.gemma3 import GEMMA3
from motet.models.whole.llava import LLAVA

WHOLE: dict[str, WholeFamily] = {"llava": LLAVA, "gemma3": GEMMA3}
