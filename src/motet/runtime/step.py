"""A training step: clears gradients, executes this rank's row of the Program, and returns the result.

The row comes from `schedule/generators/data_parallel.py`; actions on modules that a microbatch lacks are left out. Its
last actions are NORM (sums the squared norm, the loss and the targets over ranks, and clips) and STEP (the optimizer).

loss = sum of the loss over all targets of all ranks and microbatches / number of these targets. Each generator adds its
weight x (sum of its loss over its items of all ranks and microbatches / number of their rows). A step whose loss or
gradient is not finite changes neither weights nor the optimizer's state.
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
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from motet.core.timeline import Timeline
from motet.core.workload import BACKBONE
from motet.dispatch.batch import RankBatch
from motet.dispatch.exchange import exchange_rows
from motet.runtime.casting import compute_types_of, computing
from motet.runtime.clip import scale_gradients, square_sum, unscale_and_clip
from motet.runtime.clock import ActionClock
from motet.runtime.exchanges import Exchanges
from motet.runtime.executor import Executor, Handler, Hook, RankProgram
from motet.runtime.loss_scale import LossScale
from motet.runtime.mesh import Mesh
from motet.runtime.module_stages import module_stages
from motet.runtime.passes import StagePasses
from motet.runtime.replicas import ReplicatedGradients
from motet.runtime.sent_bytes import SentBytes, by_kind, count_fsdp
from motet.runtime.stage import Model, generators_of, is_trainable, make_ahead, modules_by_phase
from motet.runtime.tensors import Tensors
from motet.schedule.generators.data_parallel import data_parallel
from motet.schedule.passes import Presence, add_exchanges, without_absent
from motet.schedule.program import WHOLE_RANK, Action, Kind, Program, action_words


@dataclass(frozen=True)
class MadeRows:
    """What a generator had to make in a step: rows of its items, over all ranks. weight: of its loss."""

    num_rows: int
    weight: float


@dataclass(frozen=True, eq=False)
class StepResult:
    """What a step did.

    num_targets, num_tokens, num_examples: summed over all ranks and microbatches.
    moved_bytes:    features and gradients that were sent from rank to rank, summed over all ranks.
    crossing_bytes: the part of moved_bytes that went from node to node.
    sent_bytes:     bytes that all ranks sent by kind: those of `sent_bytes.SENT_KINDS`.
    actions:        names of actions, in words, that other ranks have; this rank may lack them.
    made:           what each generator had to make.
    loss_scale:     what the loss was multiplied by for the backward pass; None in types that need no scale.
    met_s:          when all ranks met, in the sum over ranks before the update, in the seconds of the timeline.
    """

    step: int
    num_targets: int
    num_tokens: int
    num_examples: int
    moved_bytes: int
    crossing_bytes: int
    sent_bytes: Mapping[str, int]
    timeline: Timeline
    _totals: Sequence[float] = field(repr=False)
    actions: tuple[str, ...] = ()
    met_s: float = math.nan
    made: Mapping[str, MadeRows] = field(default_factory=dict)
    loss_scale: float | None = None

    @cached_property
    def _read(self) -> tuple[float, float, float, dict[str, float]]:
        """Squared gradient norm, sum of the loss, number of targets, and sums of the losses of generators.

        Raises RuntimeError if the number is wrong."""
        square_norm, loss_sum, num_targets, *loss_sums = self._totals
        if num_targets != self.num_targets:
            raise RuntimeError(
                f"the backbone took loss on {num_targets:.0f} targets, the lengths say {self.num_targets}"
            )
        return square_norm, loss_sum, num_targets, dict(zip(self.made, loss_sums, strict=True))

    @property
    def has_loss(self) -> bool:
        """Whether the step has a target, or anything to make."""
        return self.num_targets > 0 or any(each.num_rows for each in self.made.values())

    @property
    def loss(self) -> float:
        """What the step lowers: the loss of tokens, and those of generators times their weights."""
        return self.losses[BACKBONE] + sum(self.losses[name] * each.weight for name, each in self.made.items())

    @property
    def losses(self) -> dict[str, float]:
        """The loss of tokens ("backbone"), mean over all targets; of each generator, mean over the rows of its items.

        One of which the step has nothing is 0.
        """
        sums = self._read[3]
        made = {name: sums[name] / max(each.num_rows, 1) for name, each in self.made.items()}
        return {BACKBONE: self._read[1] / max(self.num_targets, 1)} | made

    @property
    def grad_norm(self) -> float:
        """Norm of the gradient of all parameters, before clipping."""
        return self._read[0] ** 0.5

    @property
    def is_finite(self) -> bool:
        """Whether loss and gradient norm are finite; the same on all ranks. If not, the step changed nothing."""
        return math.isfinite(self.loss) and math.isfinite(self.grad_norm)

    @property
    def has_overflowed(self) -> bool:
        """Whether the loss is finite and its gradient is not, as when it overflows float16; the same on all ranks."""
        return math.isfinite(self.loss) and not math.isfinite(self.grad_norm)

    @property
    def seconds_by_action(self) -> dict[str, float]:
        """This rank's seconds by kind and module of its actions, in words: "forward image", "norm".

        All ranks have the same names in the same order.
        """
        return dict.fromkeys(self.actions, 0.0) | {
            action_words(kind, module): seconds for (kind, module), seconds in self.timeline.seconds_by_kind().items()
        }


class TrainStep:
    """Runs training steps of one model on one rank; every rank calls `run` with its own part of the same microbatches.

    model:         sharded by `runtime/fsdp.py`, or the same whole copy on every rank, whose gradients are then summed.
    optimizer:     None: the step computes gradients and updates no weight.
    max_grad_norm: None: gradients are not clipped.
    once_a_step:   as of `FSDPConfig`.
    loss_scale:    what the loss is multiplied by before the backward pass. Gradients and their norm are divided by it
                   before they are clipped. The caller notes how a step ended.

    Example:
        >>> from types import SimpleNamespace
        >>> group = SimpleNamespace(size=lambda: 1)
        >>> mesh = SimpleNamespace(rank=0, num_ranks=1, device=torch.device("cpu"), group=group, expert_cuts=None)
        >>> step = TrainStep(SimpleNamespace(encoders={}, backbone=torch.nn.Linear(1, 1)), mesh)
        >>> text_only = SimpleNamespace(lengths=SimpleNamespace(items={}, num_examples=2))
        >>> print(*step.program([text_only, text_only]).row)
        0F0 0B0 0F1 0B1 0NORM 0STEP
    """

    def __init__(
        self,
        model: Model,
        mesh: Mesh,
        optimizer: torch.optim.Optimizer | None = None,
        *,
        max_grad_norm: float | None = None,
        once_a_step: bool = False,
        loss_scale: LossScale | None = None,
        clock: ActionClock | None = None,
    ) -> None:
        self.model = model
        self.mesh = mesh
        self.optimizer = optimizer
        self.max_grad_norm, self.once_a_step, self.loss_scale = max_grad_norm, once_a_step, loss_scale
        self.clock = clock or ActionClock(mesh.rank, mesh.device)
        self.modules = modules_by_phase(model)
        self.parameters = [parameter for module in self.modules.values() for parameter in module.parameters()]
        self.experts = [p for p in self.parameters if isinstance(p, DTensor) and p.device_mesh == mesh.expert_cuts]
        self.types = compute_types_of(model)
        self.is_wrapped = any(isinstance(module, FSDPModule) for module in self.modules.values())
        self.sent = SentBytes()
        for module in self.modules.values() if self.is_wrapped else ():
            count_fsdp(module, self.sent)
        self.replicated = (
            {}
            if self.is_wrapped
            else {
                name: ReplicatedGradients(
                    module.parameters(), mesh.group, self.types.reduce or self.types.compute, self.sent
                )
                for name, module in self.modules.items()
                if is_trainable(module)
            }
        )

    def run(self, batches: Sequence[RankBatch], step: int = 0) -> StepResult:
        """Take one step; gradients accumulate over the microbatches. A collective.

        All ranks end with the same kind of gradient for a parameter: None if no rank had input for its module in the
        whole step, so that the optimizer leaves it alone; zero if its module ran and did not use it.
        """
        leave_out = () if self.optimizer else (Kind.STEP,)
        # What has been gathered and summed between steps, as for held-out data, is none of the step's.
        self.sent.take()
        self.take_product_bytes()
        with computing(self.model):
            running = _RunningStep(self, batches)
            Executor(running.program, running.handlers, self.clock, leave_out=leave_out).run(step)
        moved_bytes = self.mesh.tensor_size * running.exchanges.moved_bytes
        *totals, shared_bytes, gathered_bytes, reduced_bytes = running.totals.tolist()  # The host waits here alone.
        return StepResult(
            step,
            running.num_targets,
            sum(batch.num_tokens for batch in batches),
            sum(batch.lengths.num_examples for batch in batches),
            moved_bytes,
            self.mesh.tensor_size * running.exchanges.crossing_bytes,
            by_kind(0, moved_bytes + shared_bytes, gathered_bytes, reduced_bytes),
            self.clock.take(),
            totals,
            met_s=self.clock.met_s,
            made=running.made,
            loss_scale=self.loss_scale and self.loss_scale.value,
        )

    def prepared(self, batch: RankBatch, dtype: torch.dtype) -> RankBatch:
        """A loaded microbatch with what attention will ask of the host: for the thread that loads.

        batch: on the host. dtype: in which modules compute. Where ranks share items, `Mesh.shared_rows` must have been
        asked for before, as it is a collective; nothing else here is one.
        """
        batch = self._shared(batch)
        blocks = {name: range(len(getattr(module, "blocks", ()))) for name, module in self.modules.items()}
        make_ahead(blocks, self.model, batch, self.mesh.device, dtype)
        return batch

    def _shared(self, batch: RankBatch) -> RankBatch:
        """A microbatch with the group of the ranks that share its items, if any do."""
        return batch.sharing(lambda _: self.mesh.shared_rows) if batch.decision.shares_items else batch

    def accumulate(self, batches: Sequence[RankBatch], *, before: Hook | None = None) -> None:
        """Run all forward and backward passes and their exchanges, without NORM and STEP. A collective.

        Leaves gradients, summed over microbatches and ranks.
        before: called before each action, with its index in the row and the action.
        """
        with computing(self.model):
            running = _RunningStep(self, batches)
            Executor(running.program, running.handlers, self.clock, leave_out=WHOLE_RANK).run(0, before)
            running.complete()

    def take_product_bytes(self) -> float:
        """Bytes that this rank has sent since the last call to those that share products or experts with it."""
        lists = [ranks.sent for ranks in (self.mesh.tensor, self.mesh.experts) if ranks is not None]
        taken = sum(map(sum, lists))
        for sent in lists:
            sent.clear()
        return taken

    def program(self, batches: Sequence[RankBatch]) -> RankProgram:
        """What this rank executes for the microbatches of a step."""
        trainable = tuple((name, is_trainable(module)) for name, module in self.modules.items())
        return _program(trainable, self.mesh.num_ranks, self.mesh.rank, tuple(map(presence_of, batches)))


class _RunningStep:
    """One step while it runs: its Program, the handlers of its actions, and its totals.

    totals: float64 [6 + generators], squared gradient norm, sum of the loss, number of targets, the sum of each
            generator's loss, and bytes: those which ranks that share sequences or products gave each other, gathered
            and reduced; of this rank, after NORM of all.
    """

    def __init__(self, step: TrainStep, batches: Sequence[RankBatch]) -> None:
        for parameter in step.parameters:
            parameter.grad = None
        self.step, self.program = step, step.program(batches)
        if step.types.compute is not None:
            batches = [batch.to(step.mesh.device, dtype=step.types.compute) for batch in batches]
        self.batches = batches = [step._shared(batch) for batch in batches]
        for stage in self.program.last_backward:
            if gradients := step.replicated.get(self.program.modules[stage]):
                gradients.zero()
        self.num_targets = sum(batch.num_targets for batch in batches)
        generators = generators_of(step.model)
        self.made = {
            name: MadeRows(sum(int(batch.lengths.items[name].length.sum()) for batch in batches), module.weight)
            for name, module in generators.items()
        }
        self.totals = torch.zeros(3 + len(generators) + 3, dtype=torch.float64, device=step.mesh.device)
        stages = module_stages(
            step.model,
            self.program.modules,
            step.mesh,
            step.replicated,
            self.totals,
            {name: self.totals[3 + index] for index, name in enumerate(generators)},
            once_a_step=step.once_a_step,
        )
        tensors = Tensors()
        self.exchanges = Exchanges(self.program, batches, tensors, step.mesh.group)
        self.scale = step.loss_scale.value if step.loss_scale else 1.0
        # FSDP divides gradients by the number of ranks, so the loss is multiplied by it; whole copies only sum them.
        factor = self.scale * (step.mesh.num_ranks if step.is_wrapped else 1)
        loss_gradients = {BACKBONE: factor / max(self.num_targets, 1)}
        loss_gradients |= {name: factor * each.weight / max(each.num_rows, 1) for name, each in self.made.items()}
        self.passes = StagePasses(self.program, stages, batches, self.exchanges, tensors, loss_gradients)

    @property
    def totals_of_loss(self) -> Tensor:
        """The totals without the bytes: by them a step is finite."""
        return self.totals[:-3]

    @property
    def handlers(self) -> Mapping[Kind, Handler]:
        """What each kind of action calls; built anew, as a stored dict would make a reference cycle.

        A cycle keeps the microbatches in memory until the garbage collector runs.
        """
        whole_rank = {Kind.NORM: self.norm, Kind.STEP: self.update}
        return {**self.passes.handlers, **self.exchanges.handlers, **whole_rank}

    def norm(self, action: Action) -> None:
        """Sum (squared gradient norm, loss, targets) over ranks in one collective, then clip the gradients."""
        mesh, parameters = self.step.mesh, self.step.parameters
        self.complete()
        shares = [gradients.square_sum(mesh.device) for gradients in self.step.replicated.values()]
        size = mesh.tensor_size
        self.totals[0] = sum(shares) if shares else square_sum(parameters, mesh.num_ranks, mesh.device, size)
        if mesh.tensor is not None and mesh.tensor.index:
            self.totals[1:-3] = 0  # Ranks that share products all compute the same loss.
        shared_bytes = sum(batch.shared_bytes for batch in self.batches) + self.step.take_product_bytes()
        for place, size_bytes in enumerate((shared_bytes, *self.step.sent.take()), start=-3):
            self.totals[place] = size_bytes
        dist.all_reduce(self.totals, group=mesh.everyone)
        self.step.clock.meet()
        unscale_and_clip(parameters, self.totals[0], self.step.max_grad_norm, self.scale)

    def complete(self) -> None:
        """Wait until gradients of whole copies are summed over ranks, and divide those of experts as all others are."""
        for gradients in self.step.replicated.values():
            gradients.wait()
        size = self.step.mesh.expert_size
        if size > 1:
            share = torch.full((), 1 / size, dtype=torch.float64, device=self.step.mesh.device)
            scale_gradients(self.step.experts, share)

    def update(self, action: Action) -> None:
        """Step the optimizer, unless loss or gradient is not finite."""
        assert self.step.optimizer is not None
        update_if_finite(self.step.optimizer, self.totals_of_loss)


def update_if_finite(optimizer: torch.optim.Optimizer, totals: Tensor) -> None:
    """Step the optimizer, unless the totals of the step (as in `_RunningStep`) are not finite."""
    is_bad = ~torch.isfinite(totals).all()
    if is_bad.device.type != "cpu" and all(group.get("fused") for group in optimizer.param_groups):
        # A fused optimizer reads this flag on the device, as with a GradScaler, so the host does not wait.
        # On a CPU the flag would cost one more kernel a parameter, and reading it on the host costs nothing.
        optimizer.found_inf = is_bad.float()  # type: ignore[attr-defined]
        optimizer.step()
    elif not is_bad:
        optimizer.step()


def presence_of(batch: RankBatch) -> Presence:
    """The modules that a microbatch has input for, and those whose rows move between ranks; the same on all ranks."""
    modules = {phase for phase in batch.lengths.items if batch.has(phase)}
    return Presence(
        frozenset(modules | ({BACKBONE} if batch.lengths.num_examples else set())),
        frozenset(phase for phase in modules if not batch.routes[phase].is_local),
    )


_Trainable: TypeAlias = tuple[tuple[str, bool], ...]
"""(module, whether it is trainable), a pair a stage."""


@lru_cache(maxsize=256)
def _program(trainable: _Trainable, num_ranks: int, rank: int, present: tuple[Presence, ...]) -> RankProgram:
    """The row of a rank. Cached: many steps have the same modules present."""
    trainable_stages = [stage for stage, (_, is_trained) in enumerate(trainable) if is_trained]
    program = without_absent(_full_program(trainable, num_ranks, len(present)), present, trainable_stages)
    return RankProgram.of(program, rank)


@lru_cache(maxsize=4)
def _full_program(trainable: _Trainable, num_ranks: int, num_microbatches: int) -> Program:
    """The Program of a step whose microbatches all have input for every module."""
    return add_exchanges(data_parallel(dict(trainable), num_ranks, num_microbatches))


@torch.no_grad()
def forward_features(model: Model, batch: RankBatch, group: dist.ProcessGroup) -> dict[str, Tensor]:
    """Features of the phases of a microbatch, on the ranks that run their sequences, without a graph. A collective."""
    features = {}
    for phase in model.encoders:
        if batch.has(phase):
            features[phase] = exchange_rows(model.encoders[phase](*batch.inputs(phase)), batch.routes[phase], group)
    return features
