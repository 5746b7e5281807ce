"""Executes a step: the actions of each microbatch, then the reduction over ranks and the optimizer.

Modules are cut apart: a module's forward pass runs on inputs detached from the modules before it, and its backward pass
is called by name with the gradient that came back. So the order of collectives is written down (`runtime/actions.py`),
not left to the autograd engine, and every action is a span of the Timeline.

The loss of a step is the sum over all targets of all ranks and microbatches, divided by their number. A step whose loss
or gradient is not finite changes nothing: neither weights nor the optimizer's state.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cached_property

import torch
import torch.distributed as dist
from torch import Tensor

from motet.core.timeline import Timeline
from motet.core.workload import BACKBONE
from motet.dispatch.batch import RankBatch
from motet.dispatch.exchange import exchange_rows
from motet.dispatch.route import Route
from motet.runtime.actions import Action, Kind, microbatch_actions
from motet.runtime.clip import clip_factor, scale_gradients, square_sum
from motet.runtime.clock import ActionClock
from motet.runtime.fsdp import sum_over_replicas
from motet.runtime.mesh import Mesh
from motet.runtime.stage import Model, is_trainable, modules_by_phase
from motet.schedule.program import Kind as ProgramKind


@dataclass(frozen=True, eq=False)
class StepResult:
    """What a step did. Loss and norm are read from the device when they are first asked for.

    num_targets, num_tokens, num_examples: over all ranks and microbatches.
    moved_bytes, crossing_bytes: features and gradients sent from rank to rank, and of those from node to node, in all.
    """

    step: int
    num_targets: int
    num_tokens: int
    num_examples: int
    moved_bytes: int
    crossing_bytes: int
    timeline: Timeline
    _totals: Tensor = field(repr=False)

    @cached_property
    def _read(self) -> tuple[float, float, float]:
        square_norm, loss_sum, counted = self._totals.tolist()
        if counted != self.num_targets:
            raise RuntimeError(f"the backbone took loss on {counted:.0f} targets, the lengths say {self.num_targets}")
        return square_norm, loss_sum, counted

    @property
    def loss(self) -> float:
        """Mean over all targets of the step; 0 where there is none."""
        return self._read[1] / max(self.num_targets, 1)

    @property
    def grad_norm(self) -> float:
        """Norm of the gradient of all parameters, before clipping."""
        return self._read[0] ** 0.5

    @property
    def is_finite(self) -> bool:
        """Whether loss and gradient are; where they are not, the step changed nothing. The same on all ranks."""
        return math.isfinite(self.loss) and math.isfinite(self.grad_norm)

    @property
    def seconds_by_action(self) -> dict[str, float]:
        """This rank's seconds per action name."""
        return self.timeline.seconds_by_action()


class TrainStep:
    """Runs steps of one model on one rank; every rank calls `run` with its own part of the same microbatches.

    model:     sharded (`runtime/fsdp.py`), or, on one rank, as it is.
    optimizer: None leaves the gradients where they are, unclipped unless max_grad_norm is given.
    """

    def __init__(
        self,
        model: Model,
        mesh: Mesh,
        optimizer: torch.optim.Optimizer | None = None,
        *,
        max_grad_norm: float | None = None,
        clock: ActionClock | None = None,
    ) -> None:
        self.model = model
        self.mesh = mesh
        self.optimizer = optimizer
        self.max_grad_norm = max_grad_norm
        self.clock = clock or ActionClock(mesh.rank, mesh.device)
        self.modules = modules_by_phase(model)
        self.encoders = [phase for phase in self.modules if phase != BACKBONE]
        self.parameters = [parameter for module in self.modules.values() for parameter in module.parameters()]

    def run(self, batches: Sequence[RankBatch], step: int = 0) -> StepResult:
        """One step over microbatches, which accumulate their gradients.

        A module that has no input on any rank in the whole step ends without gradient (None), so that the optimizer
        leaves it alone; in a module that ran, a parameter that was not used has a zero gradient; so on all ranks.
        """
        totals, moved_bytes, crossing_bytes = self.accumulate(batches, step)
        with self.clock.span("reduce", step, -1, kind=ProgramKind.REDUCE):
            self._reduce(totals)
        if self.optimizer is not None:
            with self.clock.span("optimizer", step, -1, kind=ProgramKind.STEP):
                self._update(self.optimizer, totals)
        return StepResult(
            step,
            sum(batch.num_targets for batch in batches),
            sum(batch.num_tokens for batch in batches),
            sum(batch.lengths.num_examples for batch in batches),
            moved_bytes,
            crossing_bytes,
            self.clock.take(),
            totals,
        )

    def accumulate(
        self,
        batches: Sequence[RankBatch],
        step: int = 0,
        *,
        before: Callable[[int, int, Action], None] = lambda microbatch, place, action: None,
    ) -> tuple[Tensor, int, int]:
        """All forwards and backwards: gradients, summed over microbatches and, where FSDP shards, over ranks.

        before: is told microbatch, place among its actions, and action, before that is taken.
        Returns float64 [3] for `_reduce` to complete, moved_bytes and crossing_bytes.
        """
        for parameter in self.parameters:
            parameter.grad = None
        trainable = {phase for phase, module in self.modules.items() if is_trainable(module)}
        plans = [microbatch_actions(self.encoders, _present(batch), trainable) for batch in batches]
        num_targets = sum(batch.num_targets for batch in batches)
        # FSDP averages over ranks.
        loss_scale = self.mesh.num_ranks / max(num_targets, 1)
        totals = torch.zeros(3, dtype=torch.float64, device=self.mesh.device)
        moved_bytes = crossing_bytes = 0
        for i, (batch, actions) in enumerate(zip(batches, plans, strict=True)):
            microbatch = _Microbatch(self, batch, trainable, loss_scale, totals)
            for place, action in enumerate(actions):
                if self.mesh.is_hybrid and action.kind is Kind.BACKWARD:
                    last = not any(action in later for later in plans[i + 1 :])
                    sum_over_replicas(self.modules[action.phase], last)
                before(i, place, action)
                with self.clock.span(str(action), step, i, kind=action.kind.of_program, module=action.phase):
                    microbatch.take(action)
            moved_bytes += microbatch.moved_bytes
            crossing_bytes += microbatch.crossing_bytes
        return totals, moved_bytes, crossing_bytes

    def _reduce(self, totals: Tensor) -> None:
        """Sums (squared gradient norm, loss, targets) over ranks, in one collective, and clips."""
        totals[0] = square_sum(self.parameters, self.mesh.num_ranks, self.mesh.device)
        dist.all_reduce(totals, group=self.mesh.group)
        if self.max_grad_norm is not None:
            scale_gradients(self.parameters, clip_factor(totals[0].sqrt(), self.max_grad_norm))

    def _update(self, optimizer: torch.optim.Optimizer, totals: Tensor) -> None:
        """The optimizer's step, unless loss or gradient is not finite."""
        is_bad = ~torch.isfinite(totals).all()
        if is_bad.is_cuda and all(group.get("fused") for group in optimizer.param_groups):
            # A fused optimizer reads the flag on the device, as it does for a GradScaler: the host waits for nothing.
            # On a CPU that takes a kernel more for each parameter, and to read the flag takes nothing.
            optimizer.found_inf = is_bad.float()  # type: ignore[attr-defined]
            optimizer.step()
        elif not is_bad:
            optimizer.step()


@torch.no_grad()
def forward_features(model: Model, batch: RankBatch, group: dist.ProcessGroup) -> dict[str, Tensor]:
    """Features of the phases present in a batch, on the ranks that run their sequences, to evaluate; a collective."""
    features = {}
    for phase in model.encoders:
        if batch.has(phase):
            features[phase] = exchange_rows(model.encoders[phase](*batch.media[phase]), batch.routes[phase], group)
    return features


def _present(batch: RankBatch) -> set[str]:
    phases = {phase for phase in batch.lengths.items if batch.has(phase)}
    return phases | ({BACKBONE} if batch.lengths.num_examples else set())


class _Microbatch:
    """The tensors that live between the actions of one microbatch."""

    def __init__(
        self, step: TrainStep, batch: RankBatch, trainable: set[str], loss_scale: float, totals: Tensor
    ) -> None:
        self.modules = step.modules
        self.group = step.mesh.group
        self.batch = batch
        self.trainable = trainable
        self.loss_scale = loss_scale
        self.totals = totals
        self.outputs: dict[str, Tensor] = {}
        self.features: dict[str, Tensor] = {}
        self.gradients: dict[str, Tensor] = {}
        self.moved_bytes = self.crossing_bytes = 0
        self._take = {
            Kind.FORWARD: self.forward,
            Kind.EXCHANGE: self.exchange,
            Kind.BACKWARD: self.backward,
            Kind.EXCHANGE_GRADIENTS: self.exchange_gradients,
        }

    def take(self, action: Action) -> None:
        self._take[action.kind](action.phase)

    def forward(self, phase: str) -> None:
        """Runs a module on what has arrived; records gradients only if the module, or one before it, learns."""
        module = self.modules[phase]
        if phase != BACKBONE:
            with torch.set_grad_enabled(phase in self.trainable):
                self.outputs[phase] = module(*self.batch.media[phase])
            return
        learns = phase in self.trainable or any(feature.requires_grad for feature in self.features.values())
        with torch.set_grad_enabled(learns):
            loss_sum, num_targets = module(self.batch.sequences, self.features)
        self.totals[1] += loss_sum.detach()
        self.totals[2] += num_targets
        self.outputs[phase] = loss_sum

    def exchange(self, phase: str) -> None:
        rows = self._move(self.outputs[phase].detach(), self.batch.routes[phase])
        self.features[phase] = rows.requires_grad_(phase in self.trainable)

    def backward(self, phase: str) -> None:
        output = self.outputs.pop(phase)
        if phase == BACKBONE:
            (output * self.loss_scale).backward()
        else:
            output.backward(self.gradients.pop(phase))

    def exchange_gradients(self, phase: str) -> None:
        feature = self.features.pop(phase)
        gradient = torch.zeros_like(feature) if feature.grad is None else feature.grad
        self.gradients[phase] = self._move(gradient, self.batch.routes[phase].transpose)

    def _move(self, rows: Tensor, route: Route) -> Tensor:
        moved = exchange_rows(rows, route, self.group)
        row_bytes = rows.element_size() * (rows.shape[1:].numel())
        self.moved_bytes += route.moved_rows * row_bytes
        self.crossing_bytes += route.crossing_rows * row_bytes
        return moved
