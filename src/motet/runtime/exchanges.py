"""EXCHANGE_F and EXCHANGE_B: move outputs to the ranks that need them, and gradients of outputs back.

What moves is named by the pass at the end that is not the backbone: of an encoder, whose outputs the backbone needs, or
of a generator, which needs what the backbone has at its queries, or in turns. A generator's route is that of an encoder
backwards.

If no row moves to another rank, the Program has no exchange. The rows are then only reordered on their rank, when the
next pass asks for them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from motet.core.workload import BACKBONE
from motet.dispatch.batch import RankBatch
from motet.dispatch.exchange import exchange_rows
from motet.dispatch.route import GatherRoute, Route
from motet.runtime.executor import Handler, RankProgram
from motet.runtime.tensors import PassKey, Tensors
from motet.schedule.program import Action, Kind


class Exchanges:
    """The exchanges of a step on one rank. moved_bytes, crossing_bytes: as in `StepResult`."""

    def __init__(
        self, program: RankProgram, batches: Sequence[RankBatch], tensors: Tensors, group: dist.ProcessGroup
    ) -> None:
        self._program, self._batches, self._tensors, self._group = program, batches, tensors, group
        self.moved_bytes = self.crossing_bytes = 0

    @property
    def handlers(self) -> Mapping[Kind, Handler]:
        """The handlers of EXCHANGE_F and EXCHANGE_B."""
        return {Kind.EXCHANGE_F: self._forward, Kind.EXCHANGE_B: self._backward}

    def arrived(self, key: PassKey) -> Tensor | None:
        """What moves by the name `key`, as the next stage takes it in; None if nothing was made of it."""
        if key in self._tensors.outputs:
            self._send(key, None)
        if self._has_backward(key):
            return self._tensors.arrived.get(key)  # Kept: `returned` reads its gradient.
        return self._tensors.arrived.pop(key, None)

    def returned(self, key: PassKey) -> Tensor | None:
        """The gradient of what moved by the name `key`; None if nothing did."""
        if key in self._tensors.arrived:
            self._send_back(key, None)
        return self._tensors.gradients.pop(key, None)

    def _forward(self, action: Action) -> None:
        self._send(self._key(action), self._group)

    def _backward(self, action: Action) -> None:
        self._send_back(self._key(action), self._group)

    def _key(self, action: Action) -> PassKey:
        is_given = self._program.modules[action.stage] == BACKBONE
        return action.peer if is_given else action.stage, action.microbatch

    def _source(self, stage: int) -> int:
        """The stage that makes what moves by the name of a stage: itself, or the backbone's for a generator."""
        sources = self._program.sources[stage]
        return next((source for source in sources if self._program.modules[source] == BACKBONE), stage)

    def _has_backward(self, key: PassKey) -> bool:
        return (self._source(key[0]), key[1]) in self._program.has_backward

    def _send(self, key: PassKey, group: dist.ProcessGroup | None) -> None:
        """Move an output forward. group: None if the Program has no exchange, so that no row may leave its rank."""
        moved = self._move(self._tensors.outputs.pop(key), self._route(key), group)
        self._tensors.arrived[key] = moved.requires_grad_(self._has_backward(key))

    def _send_back(self, key: PassKey, group: dist.ProcessGroup | None) -> None:
        """Move the gradient of an output back to the stage that made the output."""
        arrived = self._tensors.arrived.pop(key)
        gradient = torch.zeros_like(arrived) if arrived.grad is None else arrived.grad
        self._tensors.gradients[key] = self._move(gradient, self._route(key).transpose, group)

    def _route(self, key: PassKey) -> Route | GatherRoute:
        stage, microbatch = key
        route = self._batches[microbatch].routes[self._program.modules[stage]]
        return route if self._source(stage) == stage else route.transpose

    def _move(self, rows: Tensor, route: Route | GatherRoute, group: dist.ProcessGroup | None) -> Tensor:
        """Exchange rows along a route, and count their bytes."""
        moved = exchange_rows(rows, route, group)
        row_bytes = rows.element_size() * (rows.shape[1:].numel())
        self.moved_bytes += route.moved_rows * row_bytes
        self.crossing_bytes += route.crossing_rows * row_bytes
        return moved
