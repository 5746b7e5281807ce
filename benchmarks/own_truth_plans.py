"""The pipelines of own_truth.py: two ranks, 8 microbatches, stages as even as whole blocks allow."""

from __future__ import annotations

from motet.core.cluster import Cluster
from motet.core.plan import Plan, ScheduleKind, Unit
from motet.core.spec import ModelSpec
from motet.core.workload import BACKBONE

DEEPER = (
    "model.encoders.image.config.depth=2",
    "model.backbone.config.num_hidden_layers=6",
)
"""More blocks than the demo's model has."""
NUM_MICROBATCHES = 8
_ENCODERS = {"image": 2, "audio": 2}
_TWO = (_ENCODERS | {BACKBONE: 1}, {BACKBONE: 5})
_FOUR = ({"image": 2, "audio": 1}, {"audio": 1, BACKBONE: 2}, {BACKBONE: 2}, {BACKBONE: 2})
_FOLDED = ({"image": 2, "audio": 2}, {BACKBONE: 2}, {BACKBONE: 2}, {BACKBONE: 2})


def _chain(stages: tuple[dict[str, int], ...], recompute: tuple[dict[str, int], ...] = ()) -> tuple[Unit, ...]:
    return (Unit("all", stages, pp=2, zero=0, recompute=recompute),)


_HALVES = ({BACKBONE: 3}, {BACKBONE: 3})
_IN_BUBBLES = (
    Unit("llm", _HALVES, pp=2, zero=0),
    *(Unit(name, ({name: count},), dp=2, zero=0) for name, count in _ENCODERS.items()),
)
_REPLICATED = (Unit("llm", _HALVES, pp=2, zero=0, replicated=tuple(_ENCODERS)),)
_BESIDE = (Unit("encoders", (_ENCODERS,), zero=0), Unit("llm", ({BACKBONE: 6},), first_rank=1, zero=0))
PIPELINES: dict[str, tuple[tuple[Unit, ...], ScheduleKind]] = {
    "pp, gpipe": (_chain(_TWO), "gpipe"),
    "pp, 1f1b": (_chain(_TWO), "1f1b"),
    "pp, 1f1b, recomputed": (_chain(_TWO, _TWO), "1f1b"),
    "pp, interleaved_1f1b": (_chain(_FOUR), "interleaved_1f1b"),
    "pp, zb_h1": (_chain(_TWO), "zb_h1"),
    "pp, zb_v": (_chain(_FOLDED), "zb_v"),
    "pp, encoders beside": (_BESIDE, "1f1b"),
    "pp, encoders in bubbles": (_IN_BUBBLES, "1f1b"),
    "pp, encoders replicated": (_REPLICATED, "1f1b"),
}
"""Name -> units and schedule."""


SHARED = ("cp", "split")
"""Settings in which both ranks share sequences: all of them, or those that are cut."""


def pipeline_plan(name: str, spec: ModelSpec, where: Cluster, batch_size: int) -> Plan:
    """The Plan of a setting."""
    if name in SHARED:
        degrees = {"cp": 2} if name == "cp" else {"dp": 2}
        unit = Unit("all", (dict(spec.num_blocks),), zero=0, **degrees)
        balance = "split" if name == "split" else "joint"
        return Plan(spec, where, (unit,), batch_size, batch_size // 2, "1f1b", balance=balance, precision="fp32")
    units, schedule = PIPELINES[name]
    return Plan(spec, where, units, batch_size, batch_size // NUM_MICROBATCHES, schedule, precision="fp32")
