"""EXCHANGE_F and EXCHANGE_B: outputs go to the ranks that need them, gradients of outputs go back.

Where no rank has a row for another, the Program has no exchange. Rows then stay on their rank, at most in another
order, and arrive when the next pass asks for them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from motet.dispatch.batch import RankBatch
from motet.dispatch.exchange import exchange_rows
from motet.dispatch.route import Route
from motet.runtime.executor import Handler, RankProgram
from motet.runtime.tensors import PassKey, Tensors
from motet.schedule.program import Action, Kind


class Exchanges:
    """The exchanges of a step on one rank. moved_bytes, crossing_bytes: as StepResult counts them."""

    def __init__(
        self, program: RankProgram, batches: Sequence[RankBatch], tensors: Tensors, group: dist.ProcessGroup
    ) -> None:
        self._program, self._batches, self._tensors, self._group = program, batches, tensors, group
        self.moved_bytes = self.crossing_bytes = 0

    @property
    def handlers(self) -> Mapping[Kind, Handler]:
        return {Kind.EXCHANGE_F: self._forward, Kind.EXCHANGE_B: self._backward}

    def arrived(self, made: PassKey) -> Tensor | None:
        """The output of a pass, as the stage that it feeds takes it in; None where the pass did not take place."""
        if made in self._tensors.outputs and made not in self._tensors.arrived:
            self._send(made, None)
        if made in self._program.has_backward:
            return self._tensors.arrived.get(made)  # Its gradient is read from it.
        return self._tensors.arrived.pop(made, None)

    def returned(self, made: PassKey) -> Tensor | None:
        """The gradient of the output of a pass; None where the output feeds nothing."""
        if made in self._tensors.arrived:
            self._send_back(made, None)
        return self._tensors.gradients.pop(made, None)

    def _forward(self, action: Action) -> None:
        self._send((action.stage, action.microbatch), self._group)

    def _backward(self, action: Action) -> None:
        self._send_back((action.stage, action.microbatch), self._group)

    def _send(self, made: PassKey, group: dist.ProcessGroup | None) -> None:
        """group: None where rows must not leave their rank, as the Program has no exchange."""
        has_backward = made in self._program.has_backward
        output = self._tensors.outputs[made] if has_backward else self._tensors.outputs.pop(made)
        self._tensors.arrived[made] = self._move(output.detach(), self._route(made), group).requires_grad_(has_backward)

    def _send_back(self, made: PassKey, group: dist.ProcessGroup | None) -> None:
        arrived = self._tensors.arrived.pop(made)
        gradient = torch.zeros_like(arrived) if arrived.grad is None else arrived.grad
        self._tensors.gradients[made] = self._move(gradient, self._route(made).transpose, group)

    def _route(self, made: PassKey) -> Route:
        stage, microbatch = made
        return self._batches[microbatch].routes[self._program.modules[stage]]

    def _move(self, rows: Tensor, route: Route, group: dist.ProcessGroup | None) -> Tensor:
        moved = exchange_rows(rows, route, group)
        row_bytes = rows.element_size() * (rows.shape[1:].numel())
        self.moved_bytes += route.moved_rows * row_bytes
        self.crossing_bytes += route.crossing_rows * row_bytes
        return moved
