"""All parameters that a rank holds under a Plan: when they are whole, gathered, reduced and updated."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from motet.core.workload import BACKBONE
from motet.dispatch.batch import RankBatch
from motet.runtime.holders import Holders, RankGroups, Sharing
from motet.runtime.own_gradients import OwnGradients
from motet.runtime.place import Place
from motet.runtime.replicas import ReplicatedGradients
from motet.runtime.sent_bytes import SentBytes
from motet.runtime.sharded_state import SAME_TYPES, ComputeTypes, ShardedState
from motet.runtime.shards import share_out
from motet.schedule.program import Action, Kind

_COLLECTIVES = (Kind.GATHER, Kind.REDUCE)


@dataclass(frozen=True)
class HeldPart:
    """Parameters of one module that the same ranks share in the same way."""

    sharing: Sharing
    state: OwnGradients | ReplicatedGradients | ShardedState

    def is_of(self, stage: int) -> bool:
        """Whether the collectives of a stage are for them. Tied parameters of several stages have none."""
        return self.sharing.is_of_stage and stage in self.sharing.stages

    @property
    def sums_once(self) -> bool:
        """Whether gradients add up in place over the step, so that a second sum over ranks would count the first twice.

        Under ZeRO 2 and 3 too: what no rank shares out, as a parameter of one number, and experts of which each rank
        of a sharded copy has others.
        """
        return self.sharing.zero < 2

    def is_of_any(self, stages: Collection[int]) -> bool:
        """Whether the collectives of any of these stages are for them."""
        return any(self.is_of(stage) for stage in stages)


class HeldParameters:
    """The parameters of this rank's part of a model.

    model:   the part with its weights, after `share_out_part`.
    holders: name of each of the part's parameters -> who holds it. groups: of `sharing_groups`.
    sent:    counts the bytes of gathers and reductions.
    """

    def __init__(
        self,
        model: nn.Module,
        place: Place,
        holders: Mapping[str, Holders],
        groups: RankGroups,
        types: ComputeTypes = SAME_TYPES,
    ) -> None:
        self.types, self.sent = types, SentBytes()
        parts: dict[tuple[Sharing, bool], list[nn.Parameter]] = {}
        for name, parameter in model.named_parameters():
            casts = types.casts(parameter.dtype)
            sharing = Sharing.of(name, parameter, holders[name], place, casts=casts)
            is_apart = casts or sharing.is_shared_out
            if is_apart or parameter.requires_grad:
                parts.setdefault((sharing, is_apart), []).append(parameter)
        self.all = [
            HeldPart(sharing, self._state(parameters, sharing, is_apart, place.rank, groups))
            for (sharing, is_apart), parameters in parts.items()
        ]
        self._sharded = [(held, held.state) for held in self.all if isinstance(held.state, ShardedState)]
        whole = {id(stored): whole for _, state in self._sharded for stored, whole in state.pairs}
        self._places = [
            (module._parameters, key, parameter, whole[id(parameter)])
            for module in model.modules()
            for key, parameter in module._parameters.items()
            if parameter is not None and id(parameter) in whole
        ]
        stages = {kind: {action.stage for action in place.row.row if action.kind is kind} for kind in _COLLECTIVES}
        self._ungathered = [state for held, state in self._sharded if not held.is_of_any(stages[Kind.GATHER])]
        self._by_microbatch = {a.stage for a in place.row.row if a.kind is Kind.REDUCE and a.microbatch >= 0}
        self._unreduced = [
            held
            for held in self.all
            if not held.is_of_any(stages[Kind.REDUCE]) or (held.sums_once and held.is_of_any(self._by_microbatch))
        ]
        self._in_use: dict[tuple[int, int], list[ShardedState]] = {}
        self._waits = not place.program.layout.plan.cluster.device.overlaps

    def _state(
        self, parameters: list[nn.Parameter], sharing: Sharing, is_apart: bool, rank: int, groups: RankGroups
    ) -> OwnGradients | ReplicatedGradients | ShardedState:
        if is_apart:
            return ShardedState(parameters, sharing, rank, groups, self.types, self.sent)
        group = groups[sharing.ranks]
        copies = sharing.num_tensor_copies
        if group is None:
            return OwnGradients(parameters, copies)
        return ReplicatedGradients(parameters, group, sent=self.sent, num_tensor_copies=copies)

    @contextmanager
    def whole(self) -> Iterator[None]:
        """In the block, the model has its whole parameters; those that the Program does not gather are ready."""
        for state in self._ungathered:
            state.gather()
            state.use()
        for parameters, key, _, whole in self._places:
            parameters[key] = whole
        try:
            yield
        finally:
            for parameters, key, stored, _ in self._places:
                parameters[key] = stored

    def begin(self, batches: Sequence[RankBatch]) -> None:
        """Begin a step: gradients are None, or zero where any rank computes anything of their module."""
        for held in self.all:
            if not isinstance(held.state, ReplicatedGradients):
                held.state.clear()
            if any(computes(batch, held.sharing.module) for batch in batches):
                held.state.zero()

    def gather(self, action: Action, batches: Sequence[RankBatch]) -> None:
        """GATHER and GATHER_B: start to gather what a stage computes with, in a microbatch or, if -1, in the step."""
        states = [state for held, state in self._sharded if held.is_of(action.stage) and _has(held, action, batches)]
        for state in states:
            state.gather()
            if self._waits:
                state.use()
        if action.microbatch >= 0:
            self._in_use[action.stage, action.microbatch] = states

    def use(self, stage: int) -> None:
        """Wait until the parameters of a stage are whole, before a pass."""
        for held, state in self._sharded:
            if held.is_of(stage):
                state.use()

    def release(self, stage: int, microbatch: int) -> None:
        """End the use of what was gathered for a pass of a microbatch, behind that pass."""
        for state in self._in_use.pop((stage, microbatch), ()):
            state.release()

    def collect(self, stage: int) -> None:
        """Take in the gradients of a backward pass of a stage."""
        for held, state in self._sharded:
            if held.is_of(stage):
                state.collect()

    def reduce(self, action: Action, batches: Sequence[RankBatch]) -> None:
        """REDUCE: start to sum the gradients of a stage over the ranks that share them."""
        by_microbatch = action.stage in self._by_microbatch
        for held in self.all:
            if by_microbatch and held.sums_once:
                continue  # `finish` sums them.
            if held.is_of(action.stage) and held.state.has_gradients and _has(held, action, batches):
                if by_microbatch and action.microbatch < 0:
                    assert isinstance(held.state, ShardedState), "others sum once"
                    held.state.start_copies()
                else:
                    held.state.start()
                if self._waits:
                    held.state.wait()

    def finish(self, device: torch.device) -> Tensor:
        """Sum what no REDUCE has summed and wait for all; returns this rank's share of the squared norm, float64."""
        for held in self._unreduced:
            if held.state.has_gradients:
                held.state.start()
        total = torch.zeros((), dtype=torch.float64, device=device)
        for held in self.all:
            if held.state.has_gradients:
                held.state.wait()
                total += held.state.square_sum(device)
        return total

    def updated(self) -> None:
        """The optimizer has changed the stored parameters."""
        for _, state in self._sharded:
            state.is_updated()


def share_out_part(
    model: nn.Module,
    place: Place,
    holders: Mapping[str, Holders],
    groups: RankGroups,
    device: torch.device,
    types: ComputeTypes = SAME_TYPES,
) -> None:
    """Share out the parameters of this rank's part, in place, before it has weights or after. Arguments: as above."""
    sharings = {
        name: Sharing.of(name, parameter, holders[name], place, casts=types.casts(parameter.dtype))
        for name, parameter in model.named_parameters()
    }
    shared = {name: sharing for name, sharing in sharings.items() if sharing.is_shared_out}
    share_out(model, shared, place.rank, groups, device.type)


def computes(batch: RankBatch, module: str) -> bool:
    """Whether any rank computes anything of a module in a microbatch; the same on all ranks."""
    return batch.lengths.num_examples > 0 if module == BACKBONE else batch.has(module)


def _has(held: HeldPart, action: Action, batches: Sequence[RankBatch]) -> bool:
    """Whether the microbatch of an action, or the step, has anything to compute with these parameters."""
    return action.microbatch < 0 or computes(batches[action.microbatch], held.sharing.module)
