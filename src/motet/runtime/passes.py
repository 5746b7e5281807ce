"""F and B: forward and backward passes of the stages of one rank.

A forward pass runs on inputs that are detached from the stages before it. Each backward pass is called explicitly, with
the gradient that came back. So the Program decides the order of collectives, not the autograd engine.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch

from motet.dispatch.batch import RankBatch
from motet.runtime.exchanges import Exchanges
from motet.runtime.executor import Handler, RankProgram
from motet.runtime.stage import ExecutableStage
from motet.runtime.tensors import Tensors
from motet.schedule.program import Action, Kind


class StagePasses:
    """The forward and backward passes of a step on one rank.

    stages:        stage number -> stage, for the rank's stages.
    loss_gradient: the gradient that a backward pass starts with if its output is a loss, which feeds no stage.
    """

    def __init__(
        self,
        program: RankProgram,
        stages: Mapping[int, ExecutableStage],
        batches: Sequence[RankBatch],
        exchanges: Exchanges,
        tensors: Tensors,
        loss_gradient: float,
    ) -> None:
        self._program, self._stages, self._batches = program, stages, batches
        self._exchanges, self._tensors, self._loss_gradient = exchanges, tensors, loss_gradient

    @property
    def handlers(self) -> Mapping[Kind, Handler]:
        """The handlers of F and B."""
        return {Kind.F: self._forward, Kind.B: self._backward}

    def _forward(self, action: Action) -> None:
        """Run a stage on the outputs that have arrived; record a graph only if a backward pass follows."""
        stage, microbatch = action.stage, action.microbatch
        inputs = {}
        for source in self._program.sources[stage]:
            if (arrived := self._exchanges.arrived((source, microbatch))) is not None:
                inputs[self._program.modules[source]] = arrived
        has_backward = (stage, microbatch) in self._program.has_backward
        with torch.set_grad_enabled(has_backward):
            output = self._stages[stage].forward(self._batches[microbatch], inputs)
        if has_backward or stage in self._program.feeding:
            self._tensors.outputs[stage, microbatch] = output

    def _backward(self, action: Action) -> None:
        """Run a stage's backward pass from the gradient that came back, or from the loss."""
        stage, microbatch = action.stage, action.microbatch
        output = self._tensors.outputs.pop((stage, microbatch))
        gradient = self._exchanges.returned((stage, microbatch))
        if gradient is None:
            gradient = torch.full_like(output, self._loss_gradient)
        is_last = self._program.last_backward[stage] == microbatch
        self._stages[stage].backward(output, gradient, is_last=is_last)
