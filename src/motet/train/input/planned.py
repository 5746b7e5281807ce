"""Loads microbatches under a Plan: each rank reads what its stages need, and takes the rest from the index.

Ranks with an encoder's first block read its media, of the microbatches that their stage takes. Ranks with the
backbone's first or last block read tokens. The other stages need sizes and lengths alone.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from motet.assign.planned_step import decide_planned_step
from motet.assign.whole_step import DecidedMicrobatch, DecidedStep
from motet.core.arrays import BoolArray
from motet.core.example import Media
from motet.core.plan import Plan
from motet.core.spec import ModelSpec
from motet.core.workload import BACKBONE, BatchLengths
from motet.cost.source import cost_model
from motet.data.examples import Examples
from motet.data.order import StepExamples
from motet.dispatch import LoadedExample, RankBatch
from motet.dispatch.stage_batch import assemble_stages
from motet.schedule import PlannedStage
from motet.simulate.predict.step_seconds import PricedStep
from motet.train.input.loading import (
    Dealt,
    DealtStep,
    Decodes,
    Loaded,
    Pending,
    submitted,
    usable_media,
    where_in,
)

_NO_SIZES = np.zeros((0, 0), dtype=np.int64)


@dataclass(frozen=True)
class StageNeeds:
    """What the stages of a rank need of a microbatch.

    replicas: as in `assemble_stages`.
    media:    phase -> the microbatches whose items it reads.
    tokens:   whether it reads tokens.
    """

    replicas: Mapping[str, int]
    media: Mapping[str, tuple[int, ...]]
    tokens: bool

    @staticmethod
    def of(replicas: Mapping[str, int], stages: Collection[PlannedStage], model: ModelSpec) -> StageNeeds:
        """stages: those of the rank. Places of rows that enter the backbone again are read with the tokens."""
        begun = {name: one.microbatches for one in stages for name, (first, _) in one.layers.items() if first == 0}
        ended = {name for one in stages for name, (_, stop) in one.layers.items() if stop == model.num_blocks[name]}
        spans = [range(*one.layers[BACKBONE]) for one in stages if BACKBONE in one.layers]
        enters_again = any(block in span for *_, block in model.reentries for span in spans)
        media = {name: microbatches for name, microbatches in begun.items() if name != BACKBONE}
        return StageNeeds(replicas, media, BACKBONE in begun.keys() | ended or enters_again)


def decided_under(plan: Plan, lengths: BatchLengths) -> DecidedStep:
    """A step of a Plan as training takes it: decided from lengths and the figures of the Plan's devices alone, so that
    all ranks decide the same, whatever profile a rank may find. Raises as `decide_planned_step` does.
    """
    if plan.order == "given":
        return decide_planned_step(plan, lengths)
    return decide_planned_step(plan, lengths, PricedStep(plan, lengths, cost_model(plan.cluster, plan.precision)))


def stages_of_examples(
    microbatch: int, decided: DecidedMicrobatch, examples: Sequence[LoadedExample], needs: StageNeeds
) -> RankBatch:
    """What the stages of a rank need of a microbatch, where every rank has loaded all examples of the step."""
    chosen = [examples[number] for number in decided.examples.tolist()]
    items: dict[str, list[Media]] = {phase: [] for phase in decided.lengths.items}
    for example in chosen:
        for phase, item in zip(example.sequence.media, example.media, strict=True):
            items[phase].append(item)
    media = {
        phase: [items[phase][item] for item in decided.decision.assignments[phase].on_rank(needs.replicas[phase])]
        for phase in items
        if microbatch in needs.media.get(phase, ())
    }
    sequences = None
    if needs.tokens:
        sequences = [chosen[index].sequence for index in decided.decision.backbone.on_rank(needs.replicas[BACKBONE])]
    sizes = {phase: np.stack([m.size for m in each]) if each else _NO_SIZES for phase, each in items.items()}
    return assemble_stages(decided.decision, decided.lengths, needs.replicas, sequences, media, sizes)


class PlannedLoading:
    """Loads what a Plan's StepAssignment gives to this rank's stages."""

    def __init__(self, plan: Plan, dataset: Examples, decoder: Decodes, needs: StageNeeds) -> None:
        self._plan, self._dataset, self._decoder, self._needs = plan, dataset, decoder, needs

    def deal(self, examples: StepExamples, num_microbatches: int) -> DealtStep:
        assert examples.group is None, "a recipe under a Plan has no groups of its own"
        ids = examples.ids
        step = decided_under(self._plan, self._dataset.batch_lengths(ids, 1))
        dealt = (Dealt(ids[part.examples], part, number) for number, part in enumerate(step.microbatches))
        return DealtStep(tuple(dealt), step)

    def start(self, dealt: Dealt) -> Pending:
        ids, decided, needs = dealt.ids, dealt.decided, self._needs
        assert decided is not None, "a Plan decides before loading"
        pending = Pending(len(ids), where_in(self._dataset, ids), lengths=decided.lengths, decision=decided.decision)
        pending.ids = ids
        pending.phases = tuple(phase for phase in decided.lengths.items if dealt.number in needs.media.get(phase, ()))
        items = {phase: decided.decision.assignments[phase].on_rank(needs.replicas[phase]) for phase in pending.phases}
        pending.items = submitted(self._dataset, self._decoder, ids, decided.lengths, items)
        if needs.tokens:
            for index in decided.decision.backbone.on_rank(needs.replicas[BACKBONE]).tolist():
                pending.sequences[index] = self._dataset.tokens(int(ids[index]))
        return pending

    def finish(self, pending: Pending, kept: BoolArray) -> Loaded:
        lengths, decision, needs = pending.lengths, pending.decision, self._needs
        assert lengths is not None
        assert decision is not None
        loaded = iter(pending.items)
        media: dict[str, list[Media]] = {}
        for phase in pending.phases:
            of_phase = [next(loaded) for _ in decision.assignments[phase].on_rank(needs.replicas[phase])]
            media[phase] = [usable_media(future) for index, future in of_phase if kept[index]]
        sizes = self._dataset.item_sizes(pending.ids[kept])
        batch = assemble_stages(
            decision.keep(kept, lengths),
            lengths.keep(kept),
            needs.replicas,
            [tokens for index, tokens in pending.sequences.items() if kept[index]] if needs.tokens else None,
            media,
            sizes,
        )
        return Loaded(batch)
