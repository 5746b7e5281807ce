"""The stages of data-parallel training: each is a whole module.

FSDP2 gathers and reduces the parameters of sharded modules; `runtime/replicas.py` sums the gradients of whole copies.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import nullcontext

import torch
from torch import Tensor

from motet.ahead import finding
from motet.core.workload import BACKBONE
from motet.dispatch.batch import RankBatch
from motet.dropout import drawing
from motet.runtime.fsdp import end_of_step, recompute_first, sum_over_shard_groups
from motet.runtime.mesh import Mesh
from motet.runtime.replicas import ReplicatedGradients
from motet.runtime.stage import BackboneModule, EncoderModule, ExecutableStage, GeneratorPart, Model, generators_of
from motet.runtime.tensors import Root


class _ModuleStage:
    def __init__(
        self,
        phase: str,
        module: EncoderModule | BackboneModule | GeneratorPart,
        mesh: Mesh,
        gradients: ReplicatedGradients | None,
        once_a_step: bool,
    ) -> None:
        self._phase, self._module, self._is_hybrid, self._gradients = phase, module, mesh.is_hybrid, gradients
        self._once_a_step = once_a_step
        self._conditions: dict[str, Tensor] = {}

    def conditions(self) -> dict[str, Tensor]:
        """As of `ExecutableStage`."""
        given, self._conditions = self._conditions, {}
        return given

    def _set_recomputation(self, batch: RankBatch) -> None:
        """Recompute as many blocks as the microbatch says, if it says any."""
        if batch.recompute is not None:
            recompute_first(self._module, batch.recompute.get(self._phase, 0))

    def backward(self, roots: Sequence[Root], gradients: Sequence[Tensor], *, is_last: bool) -> None:
        """Run the backward pass of one microbatch; the last one of a step sums gradients over ranks."""
        if self._once_a_step:
            end_of_step(self._module, is_last)
        if self._is_hybrid:
            sum_over_shard_groups(self._module, is_last)
        with self._gradients.summed() if self._gradients is not None and is_last else nullcontext():
            torch.autograd.backward([root.edge for root in roots], gradients)


class EncoderStage(_ModuleStage):
    """An encoder with its projector; it computes on this rank's items of the phase."""

    def __init__(
        self,
        phase: str,
        module: EncoderModule,
        mesh: Mesh,
        gradients: ReplicatedGradients | None,
        once_a_step: bool,
    ) -> None:
        super().__init__(phase, module, mesh, gradients, once_a_step)
        self._encoder = module

    def forward(self, batch: RankBatch, inputs: dict[str, Tensor]) -> Tensor:
        self._set_recomputation(batch)
        with drawing(self._phase, batch.draws), finding(self._phase, batch.ahead):
            return self._encoder(*batch.inputs(self._phase))


class BackboneStage(_ModuleStage):
    """The backbone. It adds the loss and the number of targets to totals[1] and totals[2] (totals: float64 [4])."""

    def __init__(
        self,
        module: BackboneModule,
        mesh: Mesh,
        gradients: ReplicatedGradients | None,
        once_a_step: bool,
        totals: Tensor,
    ) -> None:
        super().__init__(BACKBONE, module, mesh, gradients, once_a_step)
        self._backbone, self._totals = module, totals

    def forward(self, batch: RankBatch, inputs: dict[str, Tensor]) -> Tensor:
        self._set_recomputation(batch)
        with drawing(BACKBONE, batch.draws), finding(BACKBONE, batch.ahead):
            loss_sum, num_targets, *given = self._backbone(batch.sequences, inputs)
        self._totals[1] += loss_sum.detach()
        self._totals[2] += num_targets
        self._conditions = given[0] if given else {}
        return loss_sum


class GeneratorStage(_ModuleStage):
    """A generator with its output projector, on this rank's items. loss_sum: a float64 scalar, to which it adds."""

    def __init__(
        self,
        phase: str,
        module: GeneratorPart,
        mesh: Mesh,
        gradients: ReplicatedGradients | None,
        once_a_step: bool,
        loss_sum: Tensor,
    ) -> None:
        super().__init__(phase, module, mesh, gradients, once_a_step)
        self._generator, self._loss_sum = module, loss_sum

    def forward(self, batch: RankBatch, inputs: dict[str, Tensor]) -> Tensor:
        self._set_recomputation(batch)
        if batch.draws is None:
            raise ValueError(f"the generator {self._phase!r} needs `RankBatch.draws`, by which its noise is drawn")
        with drawing(self._phase, batch.draws):
            given = inputs[BACKBONE], batch.draws[self._phase], batch.item_rows[self._phase]
            loss_sum = self._generator(*batch.media[self._phase], *given)
        self._loss_sum += loss_sum.detach()
        return loss_sum


def module_stages(
    model: Model,
    modules: Mapping[int, str],
    mesh: Mesh,
    gradients: Mapping[str, ReplicatedGradients],
    totals: Tensor,
    loss_sums: Mapping[str, Tensor],
    *,
    once_a_step: bool = False,
) -> dict[int, ExecutableStage]:
    """Stage number -> stage. modules: stage number -> module, for this rank. totals: as in `BackboneStage`.

    loss_sums: generator -> where its loss is added, a float64 scalar.

    gradients: module -> its gradients, for trainable modules of which every rank holds a whole copy.
    once_a_step: as of `FSDPConfig`.
    """
    generators = generators_of(model)

    def stage(name: str) -> ExecutableStage:
        of_module = (mesh, gradients.get(name), once_a_step)
        if name == BACKBONE:
            return BackboneStage(model.backbone, *of_module, totals)
        if name in generators:
            return GeneratorStage(name, generators[name], *of_module, loss_sums[name])
        return EncoderStage(name, model.encoders[name], *of_module)

    return {number: stage(name) for number, name in modules.items()}
