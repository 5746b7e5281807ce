"""Where a rank stands under a Plan: its part of the Program, and the ranks that it sends to and receives from."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import product

from motet.core.plan import Plan, Unit
from motet.runtime.executor import RankProgram
from motet.schedule import PlannedProgram, PlannedStage, planned
from motet.schedule.coordinates import RankLink, Shares, coordinates, edge_links, share_of, shares_here
from motet.schedule.dependencies import PARTNERS, partner
from motet.schedule.program import WHOLE_RANK, Action, Kind, Program, action_words

_FORWARD = (Kind.GATHER, Kind.F, Kind.SEND_F, Kind.RECV_F)
_RECEIVES = (Kind.RECV_F, Kind.RECV_B)


@dataclass(frozen=True)
class Place:
    """The part of a Plan that one rank of the job executes.

    island, program_rank, c, t: as in `schedule.coordinates.Coordinates`.

    Example:
        >>> from motet.core.plan import Unit
        >>> from motet.core.shapes import Transformer, language_model, multimodal
        >>> from motet.cost.catalogue import cluster
        >>> model = multimodal("toy", language_model(Transformer(64, 256, num_heads=4), 2, 1000), [])
        >>> unit = Unit("llm", ({"backbone": 1}, {"backbone": 1}), dp=2, pp=2)
        >>> place = Place.of(Plan(model, cluster("H100"), (unit,), batch_size=2), rank=3)
        >>> place.island, place.program_rank, place.replicas, place.pairs
        (1, 1, {'backbone': 1}, ((0, 2), (1, 3), (2, 0), (3, 1)))
    """

    program: PlannedProgram
    rank: int
    island: int
    program_rank: int
    c: int = 0
    t: int = 0

    @staticmethod
    def of(plan: Plan, rank: int) -> Place:
        """The place of a rank. Raises as `schedule.planned` and `coordinates` do."""
        program = planned(plan)
        found = coordinates(program.layout, rank)
        return Place(program, rank, found.island, found.program_rank, found.c, found.t)

    @cached_property
    def unit(self) -> Unit:
        """The unit that owns the rank."""
        layout = self.program.layout
        return next(unit for unit in layout.units if self.rank in unit.ranks)

    def under(self, program: PlannedProgram | None) -> Place:
        """The same place in the Program of a step with fills of its own; None: in that of the Plan. Stages, ranks that
        talk and holders of parameters are those of the Plan.
        """
        if program is None:
            return self
        if program.layout is not self.program.layout:  # It is of the Plan before its ranks were closed up.
            pairs = zip(self.program.stages, program.stages, strict=True)
            stages = tuple(replace(own, microbatches=decided.microbatches) for own, decided in pairs)
            program = PlannedProgram(program.program, stages, self.program.layout)
        return replace(self, program=program)

    @cached_property
    def row(self) -> RankProgram:
        """What the rank executes."""
        return RankProgram.of(self.program.program, self.program_rank)

    @cached_property
    def forward(self) -> Place:
        """The same place in the Program of forward passes alone, as a loss is taken without training on it."""
        program = self.program.program.with_rows(lambda row: (action for action in row if action.kind in _FORWARD))
        return replace(self, program=replace(self.program, program=program))

    @cached_property
    def stages(self) -> dict[int, PlannedStage]:
        """The rank's stages by number."""
        return {number: self.program.stages[number] for number in self.program.stages_on(self.program_rank)}

    @property
    def stage_spans(self) -> tuple[Mapping[str, tuple[int, int]], ...]:
        """Module -> (first, stop) of the blocks that the rank holds, stage by stage."""
        return tuple(stage.layers for stage in self.stages.values())

    @property
    def modules(self) -> tuple[str, ...]:
        """The modules that the rank holds blocks of, each once."""
        return tuple(dict.fromkeys(name for stage in self.stages.values() for name in stage.layers))

    @cached_property
    def units(self) -> tuple[tuple[Unit, tuple[str, ...]], ...]:
        """The units of its stages, with the modules that it holds blocks of."""
        of_units: dict[str, tuple[Unit, dict[str, None]]] = {}
        for stage in self.stages.values():
            of_units.setdefault(stage.unit.name, (stage.unit, {}))[1].update(dict.fromkeys(stage.layers))
        return tuple((unit, tuple(modules)) for unit, modules in of_units.values())

    @property
    def with_sums(self) -> set[str]:
        """The modules here whose sums over tensor-parallel ranks are apart (`PlannedStage.has_sums`)."""
        return {name for stage in self.stages.values() if stage.has_sums for name in stage.layers}

    @property
    def recomputed(self) -> dict[str, int]:
        """Module -> the number of its blocks here that are recomputed; modules without any are left out."""
        counts: Counter[str] = Counter()
        for stage in self.stages.values():
            counts.update(stage.recomputed)
        return {name: count for name, count in counts.items() if count}

    @cached_property
    def replicas(self) -> dict[str, int]:
        """Module -> whose items the rank computes, for the modules of its stages (`coordinates.share_of`)."""
        layout = self.program.layout
        return {
            name: share_of(layout, name, stage, self.island, self.c_of(stage.unit))
            for stage in self.stages.values()
            for name in stage.layers
        }

    @property
    def index(self) -> int:
        """Its number among the ranks that its program rank stands for."""
        return self.c * self.unit.tp + self.t

    @property
    def noise_rank(self) -> int:
        """The rank by which this one draws what has no key of an item (`dropout.step_seed`).

        Ranks that share products draw alike, and so do the stages of a pipeline that each compute an encoder whole
        (`Unit.replicated`): its copies are one.
        """
        stage, d, c, _ = self.unit.coordinates(self.rank)
        return self.unit.rank(0 if self.unit.replicated else stage, d, c)

    def c_of(self, unit: Unit) -> int:
        """Its number among the ranks that share items of a unit that it computes, which may run in bubbles."""
        return self.index // unit.tp

    def t_of(self, unit: Unit) -> int:
        """Its number among the ranks that share products of a unit that it computes."""
        return self.index % unit.tp

    def tensor_ranks(self, unit: Unit) -> tuple[int, ...]:
        """The ranks that share products of a unit with this one, by t; itself where it shares none."""
        first = self.rank - self.t_of(unit)
        return tuple(range(first, first + unit.tp))

    @property
    def expert_ranks(self) -> tuple[int, ...]:
        """The ranks that share experts with this one, in order; itself where it shares none."""
        return self.unit.expert_ranks(self.rank)

    @property
    def expert_parts(self) -> tuple[int, ...]:
        """As of `Unit`."""
        return self.unit.expert_parts(self.rank)

    def held_by(self, ranks: tuple[int, ...], stage: PlannedStage) -> tuple[int, ...]:
        """The ranks that hold the same parameters of a stage as this rank, context-parallel ones included.

        ranks: the first of each tensor-parallel group, such as `PlannedStage.data_ranks`.
        """
        t = self.t_of(stage.unit)
        return tuple(rank + t for rank in ranks) if t else ranks

    @cached_property
    def edges(self) -> dict[tuple[int, int], int]:
        """(source, sink) -> the number of the edge in the Program, for edges of the rank's stages."""
        every = enumerate(self.program.program.edges)
        return {ends: number for number, ends in every if ends[0] in self.stages or ends[1] in self.stages}

    @cached_property
    def local_edges(self) -> dict[int, dict[int, int]]:
        """Source -> sink -> the number of the edge, where this rank has both stages, so that no message goes."""
        local: dict[int, dict[int, int]] = {}
        for (source, sink), number in self.edges.items():
            if source in self.stages and sink in self.stages:
                local.setdefault(source, {})[sink] = number
        return local

    def own_shares(self, edge: int) -> Shares:
        """The shares at the ends of an edge that joins two stages of this rank, or of ranks like it."""
        return shares_here(self.program.layout, *self.program.ends(edge), self.index)

    def program_rank_of(self, stage: int) -> int:
        """The rank of the Program that computes a stage."""
        return self.program.stages[stage].rank

    def senders(self, action: Action) -> tuple[RankLink, ...]:
        """From whom the message of a RECV of this rank comes, in parts."""
        return self._links[action.peer, action.stage, action.kind is Kind.RECV_B][1]

    def receivers(self, action: Action) -> tuple[RankLink, ...]:
        """To whom the message of a SEND of this rank goes."""
        return self._links[action.stage, action.peer, action.kind is Kind.SEND_B][0]

    @cached_property
    def _links(self) -> dict[tuple[int, int, bool], tuple[tuple[RankLink, ...], tuple[RankLink, ...]]]:
        """(stage that sends, stage that receives, is of gradients) -> links from this rank, and links to it."""
        links = {}
        for (source, sink), backward in product(self.edges, (False, True)):
            ends = (sink, source) if backward else (source, sink)
            every = self._edge_links((source, sink), self.island, backward)
            from_here = tuple(link for link in every if link.sender == self.rank)
            links[*ends, backward] = from_here, tuple(link for link in every if link.receiver == self.rank)
        return links

    @cached_property
    def answered(self) -> dict[Action, int]:
        """RECV of this rank -> the number of its SENDs to the same rank that were received before that message left."""
        return answered_sends(self.program.program, self.program_rank)

    @cached_property
    def pairs(self) -> tuple[tuple[int, int], ...]:
        """(sender, receiver) of all messages of the job, in the order that is the same on all ranks."""
        islands = range(self.program.layout.num_islands)
        every = product(self.program.program.edges, islands, (False, True))
        return tuple(sorted({(link.sender, link.receiver) for of in every for link in self._edge_links(*of)}))

    @cached_property
    def action_words(self) -> tuple[str, ...]:
        """The actions of all ranks, in words, each once."""
        rows, stages = self.program.program.actions, self.program.program.stages
        kinds = {(a.kind, "" if a.kind in WHOLE_RANK else stages[a.stage].module) for row in rows for a in row}
        return tuple(dict.fromkeys(action_words(*pair) for pair in sorted(kinds)))

    def _edge_links(self, ends: tuple[int, int], island: int, backward: bool) -> tuple[RankLink, ...]:
        source, sink = (self.program.stages[stage] for stage in ends)
        return edge_links(self.program.layout, source, sink, island, backward=backward)


def answered_sends(program: Program, rank: int) -> dict[Action, int]:
    """RECV of a program rank -> the number of its SENDs to the same rank that were received before that message left.

    So when the message is there, they have arrived.
    """
    answered = {}
    for peer in {program.stages[action.peer].rank for action in program.actions[rank] if action.kind in PARTNERS}:
        num_received = 0
        for action in program.actions[peer]:
            here = partner(action)
            if here is not None and program.stages[here.stage].rank == rank:
                if action.kind in _RECEIVES:
                    num_received += 1
                else:
                    answered[here] = num_received
    return answered
