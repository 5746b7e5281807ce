"""Weights that the embedding and the output layer share, where a Plan has these on two stages."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from motet.core.plan import Plan, Unit
from motet.core.spec import ModelSpec
from motet.core.workload import BACKBONE
from motet.cost.memory import MixedPrecision, Spans, StageLayer, StateBytes, state_bytes
from motet.schedule import PlannedProgram, PlannedStage


@dataclass(frozen=True)
class TiedApart:
    """Every rank of both stages holds all of the weights, whatever the unit's ZeRO stage (`runtime/holders.py`).

    weights: of all tensor-parallel ranks. number: on one of these. trainable: whether they are updated.
    unit, stages: of the backbone; the indexes of the two stages in it.
    """

    weights: int
    number: int
    trainable: bool
    unit: str
    stages: tuple[int, int]

    @property
    def updated(self) -> int:
        """Those that one rank updates."""
        return self.number if self.trainable else 0

    def is_on(self, stage: PlannedStage) -> bool:
        """Whether it is one of the two stages."""
        return stage.unit.name == self.unit and stage.index in self.stages

    def ranks(self, planned: PlannedProgram) -> list[int]:
        """The program ranks of both stages, each once."""
        return sorted({rank for kind in planned.kinds if self.is_on(kind.stage) for rank in kind.ranks.tolist()})

    def data_ranks(self, planned: PlannedProgram) -> tuple[int, ...]:
        """The ranks of the cluster that hold the same of them: one of each tensor-parallel group."""
        holders = (kind.stage.data_ranks for kind in planned.kinds if self.is_on(kind.stage))
        return tuple(sorted({rank for ranks in holders for rank in ranks}))

    def without(self, placed: StageLayer) -> StageLayer:
        """A layer of either stage without these weights."""
        layer = placed.layer
        if layer.kind != "embedding":
            return placed
        return placed._replace(layer=replace(layer, parameters=layer.parameters - self.weights))

    def state(self, precision: MixedPrecision) -> StateBytes:
        """What a rank holds of them between passes."""
        return state_bytes(self.number, self.updated, precision=precision)


def untied(tied: TiedApart | None, stage: PlannedStage, layers: Sequence[StageLayer]) -> Sequence[StageLayer]:
    """The layers of a stage without the tied weights that a Plan has on two stages, if it has any."""
    return layers if tied is None or not tied.is_on(stage) else [tied.without(placed) for placed in layers]


def tied_apart(plan: Plan) -> TiedApart | None:
    """The tied weights of a Plan that has them on two stages; None if there are none, or if they are on one.

    Example:
        >>> from motet.core.plan import Unit
        >>> from motet.core.shapes import Transformer, language_model, multimodal
        >>> from motet.cost.catalogue import cluster
        >>> model = multimodal("tiny", language_model(Transformer(64, 256, 4), 4, 1000, tied=True), [])
        >>> unit = Unit("all", ({"backbone": 2}, {"backbone": 2}), pp=2, tp=2)
        >>> tied_apart(Plan(model, cluster("h100"), (unit,), batch_size=8)).number
        32000
    """
    unit = plan.unit_of(BACKBONE)
    held = [index for index, layers in enumerate(unit.stages) if layers.get(BACKBONE)]
    return None if held[0] == held[-1] else _tied(plan.model, unit, (held[0], held[-1]))


def tied_at_end(model: ModelSpec, unit: Unit, spans: Spans) -> TiedApart | None:
    """The tied weights of a stage of `unit` with these blocks, if it has one end of the backbone and not the other."""
    first, stop = spans.get(BACKBONE, (0, 0))
    has_first, has_last = first == 0 < stop, stop == model.num_blocks[BACKBONE]
    return _tied(model, unit, (0, len(unit.stages) - 1)) if has_first != has_last else None


def _tied(model: ModelSpec, unit: Unit, stages: tuple[int, int]) -> TiedApart | None:
    """stages: of `unit`, with the two ends of the backbone."""
    backbone = model.module(BACKBONE)
    weights = backbone.tied_weights
    if not weights:
        return None
    return TiedApart(weights, -(-weights // unit.tp), backbone.layers[0].trainable, unit.name, stages)
