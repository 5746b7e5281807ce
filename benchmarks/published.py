"""A number that a paper gives beside the one that Motet predicts from the paper's own inputs. Used by papers.py."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Literal, NamedTuple

from rich.table import Table

Standing = Literal["promised", "fitted", "shown"]
NEAR = 0.1
"""A number that is shown counts as near, if it is off by no more than this share."""


@dataclass(frozen=True)
class Range:
    """What a paper says of several numbers at once: from low to high; None is no end."""

    low: float | None = None
    high: float | None = None

    def nearest(self, value: float) -> float:
        """The value itself, if it is inside; else the end that is nearer."""
        if self.low is not None and value < self.low:
            return self.low
        return self.high if self.high is not None and value > self.high else value

    def __str__(self) -> str:
        if self.low is None or self.high is None:
            return f"at most {self.high:g}" if self.low is None else f"at least {self.low:g}"
        return f"{self.low:g} to {self.high:g}"


@dataclass(frozen=True)
class Row:
    """A line of the table.

    source:    paper and table. what: which of its numbers. unit: that it is in.
    published, predicted: a number, or the layers of each stage; what is published may be a range.
    promised:  how large the difference may be: a share, or layers of a stage; None is nothing promised.
    fitted:    constants because of which the row agrees: found on it, or such that any value of them agrees. It proves
               nothing; what is promised of it guards against changes alone.
    note:      what must be known to judge it.
    """

    source: str
    what: str
    unit: str
    published: float | tuple[int, ...] | Range
    predicted: float | tuple[int, ...]
    promised: float | None = None
    fitted: str = ""
    note: str = ""

    @property
    def difference(self) -> float:
        """Relative to what is published, to 1e-4, 0 inside a range; of layers, the largest of a stage."""
        if isinstance(self.published, tuple) or isinstance(self.predicted, tuple):
            return max(abs(ours - theirs) for ours, theirs in zip(self.predicted, self.published, strict=True))
        published = self.published.nearest(self.predicted) if isinstance(self.published, Range) else self.published
        return round(self.predicted / published - 1, 4) + 0.0

    @property
    def missed(self) -> bool:
        return self.promised is not None and abs(self.difference) > self.promised

    @property
    def standing(self) -> Standing:
        if self.fitted:
            return "fitted"
        return "shown" if self.promised is None else "promised"

    @property
    def is_near(self) -> bool:
        """Off by no more than a tenth, or a layer."""
        return abs(self.difference) <= (1 if isinstance(self.predicted, tuple) else NEAR)

    @property
    def goal(self) -> str:
        """What is promised, in words."""
        if self.promised is None:
            return "fitted" if self.fitted else "shown, not promised"
        within = f"{self.promised:.0%}" if self.promised else "what is published"
        within = f"{self.promised:g} layers" if isinstance(self.predicted, tuple) else within
        return f"fitted, within {within}" if self.fitted else f"within {within}"

    def record(self) -> dict[str, Any]:
        """For JSON, to four digits of what is predicted: more than any paper gives."""
        predicted = self.predicted if isinstance(self.predicted, tuple) else float(f"{self.predicted:.4g}")
        return {
            "name": f"{self.source}: {self.what}",
            "value": predicted,
            "met": not self.missed,
            **asdict(self),
            "goal": self.goal,
            "predicted": predicted,
            "difference": self.difference,
            "standing": self.standing,
            "missed": self.missed,
        }


class Absent(NamedTuple):
    """A table or figure of a paper of which there is no row, and why."""

    source: str
    why: str


def summary(rows: Sequence[Row]) -> str:
    """How many rows there are of each standing, and how they agree."""
    counts = Counter(row.standing for row in rows)
    promised = [row for row in rows if row.standing == "promised"]
    shown = [row for row in rows if row.standing == "shown"]
    kept = sum(not row.missed for row in promised)
    near = sum(row.is_near for row in shown)
    lost = sum(row.missed for row in rows if row.fitted)
    off = f", {lost} of them off" if lost else ""
    return (
        f"{len(rows)} rows. {counts['promised']} promised, {kept} of them met. {counts['fitted']} fitted, which prove "
        f"nothing{off}. {counts['shown']} shown and not promised: {near} are within {NEAR:.0%} or a layer of what is "
        f"published, or in its range, and {len(shown) - near} are not."
    )


def table_of(rows: Iterable[Row]) -> Table:
    table = Table(title="What papers published, and what Motet predicts from their inputs")
    for name in ("paper", "what"):
        table.add_column(name, no_wrap=True)
    for name in ("unit", "published", "predicted", "difference"):
        table.add_column(name, justify="right", no_wrap=True)
    table.add_column("goal", no_wrap=True)
    table.add_column("fitted; note")
    last = ""
    for row in rows:
        if row.source != last:
            table.add_section()
        notes = "; ".join(filter(None, (row.fitted, row.note)))
        table.add_row(row.source if row.source != last else "", row.what, row.unit, *_figures(row), row.goal, notes)
        last = row.source
    return table


def _figures(row: Row) -> list[str]:
    """What is published, predicted, and their difference."""
    if isinstance(row.published, tuple):
        shown = [" ".join(map(str, layers)) for layers in (row.published, row.predicted)]
        difference = f"{row.difference}"
    else:
        published = str(row.published) if isinstance(row.published, Range) else f"{row.published:.4g}"
        shown, difference = [published, f"{row.predicted:.4g}"], f"{row.difference:+.1%}"
    return [*shown, f"[bold red]{difference}[/]" if row.missed else difference]
