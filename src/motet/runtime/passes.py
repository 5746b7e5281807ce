"""F and B: forward and backward passes of the stages of one rank.

A forward pass runs on inputs that are detached from the stages before it. Each backward pass is called explicitly, with
the gradient that came back. So the Program decides the order of collectives, not the autograd engine.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch

from motet.core.workload import BACKBONE
from motet.dispatch.batch import RankBatch
from motet.runtime.exchanges import Exchanges
from motet.runtime.executor import Handler, RankProgram
from motet.runtime.stage import ExecutableStage
from motet.runtime.tensors import Root, Tensors
from motet.schedule.program import Action, Kind


class StagePasses:
    """The forward and backward passes of a step on one rank.

    stages:        stage number -> stage, for the rank's stages.
    loss_gradients: module -> the gradient that its backward pass starts with, if its output is a loss.
    """

    def __init__(
        self,
        program: RankProgram,
        stages: Mapping[int, ExecutableStage],
        batches: Sequence[RankBatch],
        exchanges: Exchanges,
        tensors: Tensors,
        loss_gradients: Mapping[str, float],
    ) -> None:
        self._program, self._stages, self._batches = program, stages, batches
        self._exchanges, self._tensors, self._loss_gradients = exchanges, tensors, loss_gradients
        self._fed_by_backbone = {
            program.modules[stage]: stage
            for stage, sources in program.sources.items()
            if any(program.modules[source] == BACKBONE for source in sources)
        }

    @property
    def handlers(self) -> Mapping[Kind, Handler]:
        """The handlers of F and B."""
        return {Kind.F: self._forward, Kind.B: self._backward}

    def _forward(self, action: Action) -> None:
        """Run a stage on the outputs that have arrived; record a graph only if a backward pass follows."""
        stage, microbatch = action.stage, action.microbatch
        inputs = {}
        for source in self._program.sources[stage]:
            module = self._program.modules[source]
            moved = stage if module == BACKBONE else source
            if (arrived := self._exchanges.arrived((moved, microbatch))) is not None:
                inputs[module] = arrived
        has_backward = (stage, microbatch) in self._program.has_backward
        with torch.set_grad_enabled(has_backward):
            output = self._stages[stage].forward(self._batches[microbatch], inputs)
        module = self._program.modules[stage]
        if stage in self._program.feeding and module != BACKBONE:
            self._tensors.outputs[stage, microbatch] = output.detach()
        if has_backward:
            self._tensors.roots[stage, microbatch] = Root.of(output)
        for name, rows in self._stages[stage].conditions().items():
            if self._batches[microbatch].has(name):
                key = self._fed_by_backbone[name], microbatch
                self._tensors.outputs[key] = rows.detach()
                if has_backward:
                    self._tensors.conditions[key] = Root.of(rows)

    def _backward(self, action: Action) -> None:
        """Run a stage's backward pass from the gradient that came back, or from the loss."""
        stage, microbatch = action.stage, action.microbatch
        module, roots = self._program.modules[stage], [self._tensors.roots.pop((stage, microbatch))]
        if (loss_gradient := self._loss_gradients.get(module)) is not None:
            gradients = [roots[0].filled(loss_gradient)]
        else:
            gradients = [self._exchanges.returned((stage, microbatch))]
        for fed in self._fed_by_backbone.values() if module == BACKBONE else ():
            if (given := self._tensors.conditions.pop((fed, microbatch), None)) is not None:
                roots.append(given)
                gradients.append(self._exchanges.returned((fed, microbatch)))
        is_last = self._program.last_backward[stage] == microbatch
        self._stages[stage].backward(roots, gradients, is_last=is_last)
