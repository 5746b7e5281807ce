"""A number that a paper gives beside the one that Motet predicts from the paper's own inputs. Used by papers.py."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from rich.table import Table


@dataclass(frozen=True)
class Row:
    """A line of the table.

    source:    paper and table. what: which of its numbers. unit: that it is in.
    published, predicted: a number, or the layers of each stage.
    promised:  how large the difference may be: a share, or layers of a stage; None is nothing promised.
    fitted:    constants that this row was used to find; a row that finds a constant proves nothing.
    note:      what must be known to judge it.
    """

    source: str
    what: str
    unit: str
    published: float | tuple[int, ...]
    predicted: float | tuple[int, ...]
    promised: float | None = None
    fitted: str = ""
    note: str = ""

    @property
    def difference(self) -> float:
        """Relative to what is published, to 1e-4; of layers, the largest of a stage."""
        if isinstance(self.published, tuple) or isinstance(self.predicted, tuple):
            return max(abs(ours - theirs) for ours, theirs in zip(self.predicted, self.published, strict=True))
        return round(self.predicted / self.published - 1, 4) + 0.0

    @property
    def missed(self) -> bool:
        return self.promised is not None and abs(self.difference) > self.promised

    def record(self) -> dict[str, Any]:
        """For JSON, to four digits of what is predicted: more than any paper gives."""
        predicted = self.predicted if isinstance(self.predicted, tuple) else float(f"{self.predicted:.4g}")
        return asdict(self) | {"predicted": predicted, "difference": self.difference, "missed": self.missed}


def table_of(rows: Sequence[Row]) -> Table:
    table = Table(title="What papers published, and what Motet predicts from their inputs")
    for name in ("paper", "what"):
        table.add_column(name, no_wrap=True)
    for name in ("unit", "published", "predicted", "difference", "promised"):
        table.add_column(name, justify="right", no_wrap=True)
    for name in ("fitted to it", "note"):
        table.add_column(name)
    last = ""
    for row in rows:
        if row.source != last:
            table.add_section()
        table.add_row(
            row.source if row.source != last else "", row.what, row.unit, *_figures(row), row.fitted, row.note
        )
        last = row.source
    return table


def _figures(row: Row) -> list[str]:
    """What is published, predicted, their difference, and how large it may be."""
    if isinstance(row.published, tuple):
        shown = [" ".join(map(str, layers)) for layers in (row.published, row.predicted)]
        difference, promised = f"{row.difference}", f"{row.promised}"
    else:
        shown = [f"{row.published:.4g}", f"{row.predicted:.4g}"]
        difference, promised = f"{row.difference:+.1%}", "" if row.promised is None else f"{row.promised:.0%}"
    return [*shown, f"[bold red]{difference}[/]" if row.missed else difference, promised]
