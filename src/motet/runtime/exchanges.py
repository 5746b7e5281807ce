"""EXCHANGE_F and EXCHANGE_B: move outputs to the ranks that need them, and gradients of outputs back.

If no row moves to another rank, the Program has no exchange. The rows are then only reordered on their rank, when the
next pass asks for them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
import torch.distributed as dist
from torch import Tensor

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
        """The output of the forward pass `key`, as the next stage takes it in; None if that pass did not run."""
        if key in self._tensors.outputs and key not in self._tensors.arrived:
            self._send(key, None)
        if key in self._program.has_backward:
            return self._tensors.arrived.get(key)  # Kept: `returned` reads its gradient.
        return self._tensors.arrived.pop(key, None)

    def returned(self, key: PassKey) -> Tensor | None:
        """The gradient of the output of the forward pass `key`; None if that output feeds no stage."""
        if key in self._tensors.arrived:
            self._send_back(key, None)
        return self._tensors.gradients.pop(key, None)

    def _forward(self, action: Action) -> None:
        self._send((action.stage, action.microbatch), self._group)

    def _backward(self, action: Action) -> None:
        self._send_back((action.stage, action.microbatch), self._group)

    def _send(self, key: PassKey, group: dist.ProcessGroup | None) -> None:
        """Move an output forward. group: None if the Program has no exchange, so that no row may leave its rank."""
        has_backward = key in self._program.has_backward
        output = self._tensors.outputs[key] if has_backward else self._tensors.outputs.pop(key)
        self._tensors.arrived[key] = self._move(output.detach(), self._route(key), group).requires_grad_(has_backward)

    def _send_back(self, key: PassKey, group: dist.ProcessGroup | None) -> None:
        """Move the gradient of an output back to the stage that made the output."""
        arrived = self._tensors.arrived.pop(key)
        gradient = torch.zeros_like(arrived) if arrived.grad is None else arrived.grad
        self._tensors.gradients[key] = self._move(gradient, self._route(key).transpose, group)

    def _route(self, key: PassKey) -> Route | GatherRoute:
        stage, microbatch = key
        return self._batches[microbatch].routes[self._program.modules[stage]]

    def _move(self, rows: Tensor, route: Route | GatherRoute, group: dist.ProcessGroup | None) -> Tensor:
        """Exchange rows along a route, and count their bytes."""
        moved = exchange_rows(rows, route, group)
        row_bytes = rows.element_size() * (rows.shape[1:].numel())
        self.moved_bytes += route.moved_rows * row_bytes
        self.crossing_bytes += route.crossing_rows * row_bytes
        return moved
