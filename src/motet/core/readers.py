"""The encoders that read each kind of media, and what the backbone is given where several read one item."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Literal

Combine = Literal["rows", "sum"]
"""What becomes of the rows of several encoders that read one item (`combine_error`)."""


def combine_error(readers: Mapping[str, Sequence[str]], combine: Mapping[str, Combine]) -> str:
    """What is wrong with what is said of media that several encoders read, as a sentence; "" if nothing is.

    readers: kind of media -> the encoders that read it.
    combine: kind of media -> "rows": an item has the rows of its first reader, then those of the next. "sum": the rows
             of all its readers are added, which must be equally many. It is said where there are several readers alone.

    Example:
        >>> combine_error({"image": ["siglip", "dino"]}, {"image": "rows"}), combine_error({"image": ["image"]}, {})
        ('', '')
    """
    for modality, names in readers.items():
        if len(names) > 1 and modality not in combine:
            return (
                f"{' and '.join(names)} read every {modality}, so it must be said what the backbone is given of it: "
                f'model.combine.{modality} = "rows" (the rows of one after those of the other) or "sum" (their rows '
                "are added)"
            )
    for modality in combine:
        if len(readers.get(modality, ())) < 2:
            return f"model.combine.{modality} has no effect, as fewer than two encoders read {modality}; remove it"
    return ""
