"""A step: zero gradients, then the executor over this rank's row of the Program, then the result.

The row is that of data parallelism (`schedule/generators/data_parallel.py`), without what the microbatches do not have.
It ends with NORM, which sums the norm, the loss and the targets over ranks and clips, and STEP, the optimizer.

The loss of a step is the sum over all targets of all ranks and microbatches, divided by their number. A step whose loss
or gradient is not finite changes nothing: neither weights nor the optimizer's state.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property, lru_cache
from typing import TypeAlias

import torch
import torch.distributed as dist
from torch import Tensor

from motet.core.timeline import Timeline
from motet.core.workload import BACKBONE
from motet.dispatch.batch import RankBatch
from motet.dispatch.exchange import exchange_rows
from motet.runtime.clip import clip_factor, scale_gradients, square_sum
from motet.runtime.clock import ActionClock
from motet.runtime.exchanges import Exchanges
from motet.runtime.executor import Executor, Handler, Hook, RankProgram
from motet.runtime.mesh import Mesh
from motet.runtime.module_stages import module_stages
from motet.runtime.passes import StagePasses
from motet.runtime.stage import Model, is_trainable, modules_by_phase
from motet.runtime.tensors import Tensors
from motet.schedule.generators.data_parallel import data_parallel
from motet.schedule.passes import Presence, add_exchanges, without_absent
from motet.schedule.program import WHOLE_RANK, Action, Kind, Program, action_words


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
        """This rank's seconds by kind and module of its actions, in words: "forward image", "norm".

        On all ranks the same names in the same order.
        """
        return {action_words(*named): seconds for named, seconds in self.timeline.seconds_by_kind().items()}


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
        self.parameters = [parameter for module in self.modules.values() for parameter in module.parameters()]

    def run(self, batches: Sequence[RankBatch], step: int = 0) -> StepResult:
        """One step over microbatches, which accumulate their gradients.

        A module that has no input on any rank in the whole step ends without gradient (None), so that the optimizer
        leaves it alone; in a module that ran, a parameter that was not used has a zero gradient; so on all ranks.
        """
        work = _Work(self, batches)
        Executor(work.program, work.handlers, self.clock, leave_out=() if self.optimizer else (Kind.STEP,)).run(step)
        return StepResult(
            step,
            work.num_targets,
            sum(batch.num_tokens for batch in batches),
            sum(batch.lengths.num_examples for batch in batches),
            work.exchanges.moved_bytes,
            work.exchanges.crossing_bytes,
            self.clock.take(),
            work.totals,
        )

    def accumulate(self, batches: Sequence[RankBatch], *, before: Hook | None = None) -> None:
        """All forwards and backwards, and no more: leaves gradients, summed over microbatches and, where FSDP shards,
        over ranks.

        before: is told of each action, and of its index in the row, before it is taken.
        """
        work = _Work(self, batches)
        Executor(work.program, work.handlers, self.clock, leave_out=WHOLE_RANK).run(0, before)

    def program(self, batches: Sequence[RankBatch]) -> RankProgram:
        """What this rank executes for the microbatches of a step."""
        trainable = tuple((name, is_trainable(module)) for name, module in self.modules.items())
        return _program(trainable, self.mesh.num_ranks, self.mesh.rank, tuple(map(presence_of, batches)))


class _Work:
    """One step under way: its Program, what its actions do, and what they have summed up.

    totals: float64 [3], squared gradient norm, loss and targets: of this rank, and after NORM of all.
    """

    def __init__(self, step: TrainStep, batches: Sequence[RankBatch]) -> None:
        for parameter in step.parameters:
            parameter.grad = None
        self.step, self.program = step, step.program(batches)
        self.num_targets = sum(batch.num_targets for batch in batches)
        self.totals = torch.zeros(3, dtype=torch.float64, device=step.mesh.device)
        stages = module_stages(step.model, self.program.modules, step.mesh, self.totals)
        tensors = Tensors()
        self.exchanges = Exchanges(self.program, batches, tensors, step.mesh.group)
        # FSDP averages over ranks.
        loss_gradient = step.mesh.num_ranks / max(self.num_targets, 1)
        self.passes = StagePasses(self.program, stages, batches, self.exchanges, tensors, loss_gradient)

    @property
    def handlers(self) -> Mapping[Kind, Handler]:
        """Not kept: a ring of references would hold the step's batches until garbage is collected."""
        own = {Kind.NORM: self.norm, Kind.STEP: self.update}
        return {**self.passes.handlers, **self.exchanges.handlers, **own}

    def norm(self, action: Action) -> None:
        """Sums (squared gradient norm, loss, targets) over ranks, in one collective, and clips."""
        mesh, parameters, max_norm = self.step.mesh, self.step.parameters, self.step.max_grad_norm
        self.totals[0] = square_sum(parameters, mesh.num_ranks, mesh.device)
        dist.all_reduce(self.totals, group=mesh.group)
        if max_norm is not None:
            scale_gradients(parameters, clip_factor(self.totals[0].sqrt(), max_norm))

    def update(self, action: Action) -> None:
        """The optimizer's step, unless loss or gradient is not finite."""
        optimizer = self.step.optimizer
        assert optimizer is not None
        is_bad = ~torch.isfinite(self.totals).all()
        if is_bad.is_cuda and all(group.get("fused") for group in optimizer.param_groups):
            # A fused optimizer reads the flag on the device, as it does for a GradScaler: the host waits for nothing.
            # On a CPU that takes a kernel more for each parameter, and to read the flag takes nothing.
            optimizer.found_inf = is_bad.float()  # type: ignore[attr-defined]
            optimizer.step()
        elif not is_bad:
            optimizer.step()


def presence_of(batch: RankBatch) -> Presence:
    """What a microbatch has, the same on all ranks."""
    modules = {phase for phase in batch.lengths.items if batch.has(phase)}
    return Presence(
        frozenset(modules | ({BACKBONE} if batch.lengths.num_examples else set())),
        frozenset(phase for phase in modules if not batch.routes[phase].is_local),
    )


_Trained: TypeAlias = tuple[tuple[str, bool], ...]


@lru_cache(maxsize=256)
def _program(trainable: _Trained, num_ranks: int, rank: int, present: tuple[Presence, ...]) -> RankProgram:
    """Kept, as many steps have what others had."""
    learning = [stage for stage, (_, learns) in enumerate(trainable) if learns]
    return RankProgram.of(without_absent(_whole_program(trainable, num_ranks, len(present)), present, learning), rank)


@lru_cache(maxsize=4)
def _whole_program(trainable: _Trained, num_ranks: int, num_microbatches: int) -> Program:
    """Of a step in whose microbatches everything is there."""
    return add_exchanges(data_parallel(dict(trainable), num_ranks, num_microbatches))


@torch.no_grad()
def forward_features(model: Model, batch: RankBatch, group: dist.ProcessGroup) -> dict[str, Tensor]:
    """Features of the phases present in a batch, on the ranks that run their sequences, to evaluate; a collective."""
    features = {}
    for phase in model.encoders:
        if batch.has(phase):
            features[phase] = exchange_rows(model.encoders[phase](*batch.media[phase]), batch.routes[phase], group)
    return features
