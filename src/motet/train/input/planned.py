"""Loads microbatches under a Plan: each rank reads what its stages need, and takes the rest from the index.

Ranks with an encoder's first block read its media, of the microbatches that their stage takes. Ranks with the
backbone's first or last block read tokens, and so do those with a block that must know where rows stand. The other
stages need sizes and lengths alone.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from motet.assign.planned_step import decide_planned_step
from motet.assign.step import StepAssignment
from motet.assign.whole_step import DecidedMicrobatch, DecidedStep
from motet.core.arrays import BoolArray
from motet.core.example import Media, TokenSequence
from motet.core.plan import Plan
from motet.core.workload import BACKBONE, BatchLengths
from motet.cost.source import cost_model
from motet.data.examples import Examples
from motet.data.order import StepExamples
from motet.dispatch import LoadedExample, RankBatch
from motet.dispatch.context import DEFAULT_CONTEXT, ContextConfig, ContextPlace
from motet.dispatch.cut_batch import examples_to_lay_out, examples_to_read
from motet.dispatch.stage_batch import assemble_stages
from motet.models.backbone import Backbone
from motet.runtime.place import Place
from motet.schedule import PlannedProgram, PlannedStage, planned
from motet.simulate.filling.step_filler import StepFiller
from motet.simulate.predict.step_seconds import PricedSteps
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
    readers:  phase -> the stage that reads its items, of the microbatches that the stage takes.
    tokens:   whether it reads tokens.
    """

    replicas: Mapping[str, int]
    readers: Mapping[str, PlannedStage]
    tokens: bool
    context: ContextPlace | None = None

    @staticmethod
    def of(place: Place, context: ContextConfig = DEFAULT_CONTEXT, backbone: Backbone | None = None) -> StageNeeds:
        """Of the rank of a Place. Places of rows are read with the tokens, where a block needs to know them: before it
        rows enter the backbone again, or its rows see some behind them.

        context: how attention gets rows of other ranks that share its sequences.
        backbone: that of the model; None: one whose rows see none behind them, and which merges as all do.
        """
        plan, stages = place.program.layout.plan, place.stages.values()
        model = plan.model
        begun = {name: one for one in stages for name, (first, _) in one.layers.items() if first == 0}
        ended = {name for one in stages for name, (_, stop) in one.layers.items() if stop == model.num_blocks[name]}
        spans = [range(*one.layers[BACKBONE]) for one in stages if BACKBONE in one.layers]
        knows_places = any(block in span for *_, block in model.reentries for span in spans) or (
            backbone is not None and backbone.needs_places and spans
        )
        # What a generator makes is what its last stage compares with.
        makes = {name: one for one in stages for name in ended & {*model.generators} & one.layers.keys()}
        readers = {name: stage for name, stage in (makes | begun).items() if name != BACKBONE}
        among, own = None, {} if backbone is None else {"merges": backbone.merge is not None, "sight": backbone.sight}
        if BACKBONE in place.replicas:
            among = ContextPlace.of(plan, place.c, context, **own)
        return StageNeeds(place.replicas, readers, BACKBONE in begun.keys() | ended or bool(knows_places), among)

    def reads(self, phase: str, microbatch: int, program: PlannedProgram | None) -> bool:
        """Whether it reads the items of a phase in a microbatch. program: of the step; None: that of the Plan."""
        stage = self.readers.get(phase)
        if stage is not None and program is not None:
            stage = next(one for one in program.stages if one.place == stage.place)
        return stage is not None and stage.takes(microbatch)


class StepDecider:
    """Decides the steps of a Plan as training takes them: from lengths and the figures of the Plan's devices alone, so
    that all ranks decide the same, whatever profile a rank may find.

    place:     of the rank, whose island's Program is decided.
    plan:      as it is written, by whose ranks nodes are known, where the place's is closed up; None: it is the same.
    own_fills: the Plan's own fills hold for every step.
    """

    def __init__(self, place: Place, plan: Plan | None = None, *, own_fills: bool = False) -> None:
        program = place.program if plan in (None, place.program.layout.plan) else planned(plan)
        self._plan, self._island = program.layout.plan, place.island
        by_step = self._plan.filling == "by_step" and not own_fills
        self._filler = StepFiller(program) if by_step else None
        self._seconds = step_seconds(program)

    def __call__(self, lengths: BatchLengths) -> DecidedStep:
        """Decide a step. Raises as `decide_planned_step` does."""
        return decide_planned_step(self._plan, lengths, self._seconds, self._program if self._filler else None)

    def _program(self, step: StepAssignment) -> PlannedProgram:
        assert self._filler is not None
        return self._filler.program(step, self._island)


def step_seconds(program: PlannedProgram) -> PricedSteps | None:
    """The seconds by which training orders the examples of a Plan's steps: by the figures of its devices. None: it
    orders none.
    """
    plan = program.layout.plan
    if plan.order == "given":
        return None
    return PricedSteps(plan, cost_model(plan.cluster, plan.precision, moments=plan.moments), program)


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
        phase: [items[phase][item] for item in decided.decision.items_on(phase, needs.replicas[phase])]
        for phase in items
        if needs.reads(phase, microbatch, decided.decision.program)
    }
    sequences, laid_out = None, dict[int, TokenSequence]()
    if needs.tokens:
        sequences = [chosen[index].sequence for index in decided.decision.sequences_on(needs.replicas[BACKBONE])]
        to_lay_out = examples_to_lay_out(decided.decision.cuts, decided.lengths).tolist()
        laid_out = {index: chosen[index].sequence for index in to_lay_out}
    sizes = {phase: np.stack([m.size for m in each]) if each else _NO_SIZES for phase, each in items.items()}
    return assemble_stages(
        decided.decision, decided.lengths, needs.replicas, sequences, media, sizes, needs.context, laid_out
    )


class PlannedLoading:
    """Loads what a Plan's StepAssignment gives to this rank's stages."""

    def __init__(self, decide: StepDecider, dataset: Examples, decoder: Decodes, needs: StageNeeds) -> None:
        self._decide, self._dataset, self._decoder, self._needs = decide, dataset, decoder, needs

    def deal(self, examples: StepExamples, num_microbatches: int) -> DealtStep:
        """As `Loading.deal`, as the Plan's microbatches are decided from the index."""
        assert examples.group is None, "a recipe under a Plan has no groups of its own"
        ids = examples.ids
        step = self._decide(self._dataset.batch_lengths(ids, 1))
        dealt = (Dealt(ids[part.examples], part, number) for number, part in enumerate(step.microbatches))
        return DealtStep(tuple(dealt), step)

    def start(self, dealt: Dealt) -> Pending:
        """As `Loading.start`: what the stages of this rank need."""
        ids, decided, needs = dealt.ids, dealt.decided, self._needs
        assert decided is not None, "a Plan decides before loading"
        pending = Pending(len(ids), where_in(self._dataset, ids), lengths=decided.lengths, decision=decided.decision)
        pending.ids = ids
        program = decided.decision.program
        pending.phases = tuple(phase for phase in decided.lengths.items if needs.reads(phase, dealt.number, program))
        items = {phase: decided.decision.items_on(phase, needs.replicas[phase]) for phase in pending.phases}
        pending.items = submitted(self._dataset, self._decoder, ids, decided.lengths, items)
        if needs.tokens:
            for index in examples_to_read(decided.decision, needs.replicas[BACKBONE]):
                pending.sequences[index] = self._dataset.tokens(int(ids[index]))
        return pending

    def finish(self, pending: Pending, kept: BoolArray) -> Loaded:
        """As `Loading.finish`, without a message."""
        lengths, decision, needs = pending.lengths, pending.decision, self._needs
        assert lengths is not None
        assert decision is not None
        loaded = iter(pending.items)
        media: dict[str, list[Media]] = {}
        for phase in pending.phases:
            of_phase = [next(loaded) for _ in decision.items_on(phase, needs.replicas[phase])]
            media[phase] = [usable_media(future) for index, future in of_phase if kept[index]]
        sizes, number = self._dataset.item_sizes(pending.ids[kept]), np.cumsum(kept) - 1
        left = decision.keep(kept, lengths)
        read = {int(number[index]): tokens for index, tokens in pending.sequences.items() if kept[index]}
        sequences = None
        if needs.tokens:
            sequences = [read[index] for index in left.sequences_on(needs.replicas[BACKBONE]).tolist()]
        batch = assemble_stages(
            left, lengths.keep(kept), needs.replicas, sequences, media, sizes, needs.context, laid_out=read
        )
        return Loaded(batch)
