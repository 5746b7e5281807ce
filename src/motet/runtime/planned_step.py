"""A training step under a Plan in which ranks hold different parts of the model.

A rank executes its row of the Program: F, R and B of its stages (`sections.py`), SEND and RECV (`messages.py`), REDUCE
and STEP. Losses are divided by the targets of the whole step, and gradients are plain sums over the ranks that hold the
same parameters, so that the number of replicas of a part does not matter. GATHER and REDUCE are `held.py`.

Programs of pipelines have no NORM. A rank adds up (squared gradient norm, loss, targets, bytes sent by kind) over all
ranks at its STEP, or behind its row if nothing of its stages is trained.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence, Set
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from types import MappingProxyType
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from motet.core.plan import Unit
from motet.core.spec import ModelSpec
from motet.core.workload import BACKBONE
from motet.dispatch.batch import RankBatch
from motet.dispatch.edge_messages import MessagePart, assignment_of, message_parts
from motet.dispatch.gathered_rows import GatheredRows, gathered
from motet.on_device import on_device
from motet.runtime.clip import unscale_and_clip
from motet.runtime.clock import ActionClock
from motet.runtime.deferred import DeferredWeights
from motet.runtime.executor import Executor, Handler
from motet.runtime.fsdp import recompute_first
from motet.runtime.gathering import Gathering
from motet.runtime.held import HeldParameters
from motet.runtime.loss_scale import LossScale
from motet.runtime.mesh import Mesh
from motet.runtime.messages import Messages
from motet.runtime.p2p import Lanes
from motet.runtime.parted_pass import PartedPass
from motet.runtime.paused_pass import PassThread, PausedPass
from motet.runtime.place import Place
from motet.runtime.sections import Around, BlockSpan, Section, SectionedStage, SectionRun, spans_of
from motet.runtime.sent_bytes import by_kind
from motet.runtime.stage import Model, make_ahead, modules_by_phase
from motet.runtime.step import MadeRows, StepResult, update_if_finite
from motet.runtime.tensors import StageTensors
from motet.runtime.unit_groups import UnitGroups
from motet.schedule.coordinates import Shares, comes_together
from motet.schedule.layout import BLOCK_SUMS
from motet.schedule.plan_units import can_share_items
from motet.schedule.program import Action, Kind

_IN_PARTS = (Kind.F, Kind.R, Kind.B, Kind.I, Kind.W)
_SENT = slice(3, 7)
"""Where the totals of a step have bytes sent by kind."""


class PlannedStep:
    """Runs training steps of this rank's part of a model; every rank calls `run` with its part of the same step.

    model:    this rank's part; a module that the rank holds nothing of is absent, or None.
    spec:     of the whole model.
    held:     the part's parameters. groups: of the ranks that share its work.
    weights:  generator -> the weight of its loss, of all generators of the whole model.
    Others as in `TrainStep`.
    """

    def __init__(
        self,
        model: Model,
        spec: ModelSpec,
        place: Place,
        lanes: Lanes,
        mesh: Mesh,
        held: HeldParameters,
        groups: UnitGroups,
        optimizer: torch.optim.Optimizer | None = None,
        *,
        weights: Mapping[str, float] = MappingProxyType({}),
        max_grad_norm: float | None = None,
        loss_scale: LossScale | None = None,
        clock: ActionClock | None = None,
    ) -> None:
        self.model, self.place, self.lanes, self.mesh, self.held = model, place, lanes, mesh, held
        self.groups, self.weights, self.spec = groups, weights, spec
        self.optimizer, self.max_grad_norm, self.loss_scale = optimizer, max_grad_norm, loss_scale
        self.clock = clock or ActionClock(mesh.rank, mesh.device)
        of_phase, kinds = modules_by_phase(model), dict.fromkeys(weights, "generators.") | {BACKBONE: ""}
        self.modules: dict[str, nn.Module] = {name: of_phase[name] for name in place.modules}
        named = [(f"{kinds.get(phase, 'encoders.')}{phase}.", phase, module) for phase, module in self.modules.items()]
        for stage in place.stages.values():
            for name in weights.keys() & stage.layers.keys():
                recompute_first(self.modules[name], stage.recomputed.get(name, 0), stage.layers[name])
        self.parameters = {
            prefix + name: (phase, parameter)
            for prefix, phase, module in named
            for name, parameter in module.named_parameters()
        }
        self.spans = {number: tuple(spans_of(stage, spec)) for number, stage in place.stages.items()}
        first = next(parameter for _, parameter in self.parameters.values() if parameter.is_floating_point())
        has_halves = any(action.kind is Kind.W for action in place.row.row)
        self.deferred = DeferredWeights(self.modules.values()) if has_halves else None
        self.like = torch.empty(0, dtype=held.types.compute or first.dtype, device=mesh.device)
        width = spec.module(BACKBONE).layers[0].output_width
        self.without_rows = self.like.new_empty(0, width).requires_grad_()
        self.threads: list[PassThread] = []

    def run(self, batches: Sequence[RankBatch], step: int = 0) -> StepResult:
        """Take one step, as `TrainStep.run` does. A collective."""
        leave_out = () if self.optimizer else (Kind.STEP,)
        self.held.sent.take()  # What has been gathered between steps, as for held-out data, is none of the step's.
        self.groups.sent.clear()
        with self.held.whole():
            running = _RunningPlan(self, self._place_of(batches), batches)
            running.execute(step, leave_out)
            running.end()
        totals = running.totals.tolist()  # The host waits here alone.
        sent_bytes = totals[_SENT]
        return StepResult(
            step,
            running.num_targets,
            int(running.lengths.sequence.sum()),
            running.lengths.num_examples,
            round(sent_bytes[0]),
            0,
            by_kind(*sent_bytes),
            self.clock.take(),
            totals[: _SENT.start] + totals[_SENT.stop :],
            self.place.action_words,
            self.clock.met_s,
            running.made,
            self.loss_scale and self.loss_scale.value,
        )

    def prepared(self, batch: RankBatch, dtype: torch.dtype) -> RankBatch:
        """As of `TrainStep`, for the blocks of this rank's stages."""
        batch = self._shared(batch)
        blocks: dict[str, list[int]] = {}
        for span in (span for of_stage in self.spans.values() for span in of_stage):
            blocks.setdefault(span.module, []).extend(range(span.first, span.stop))
        make_ahead(blocks, self.model, batch, self.mesh.device, dtype)
        return batch

    def _shared(self, batch: RankBatch) -> RankBatch:
        """A microbatch with the groups of the ranks that share its items."""
        groups = {name: self.groups.context.get(unit.name) for unit, names in self.place.units for name in names}
        return batch.sharing(groups.get, self.groups.replicas)

    def evaluate(
        self, batches: Sequence[RankBatch], model: Model | None = None, alone: Set[str] | None = None
    ) -> Tensor:
        """(sum of the loss, number of targets, sum of each generator's loss) of a step's microbatches over all ranks,
        float64 [2 + generators]. A collective.

        Forward passes alone; the model's train or eval mode stays. model: has the modules to run, by default its own.
        alone: generators over several stages, which alone run, and to which nothing is given; None: all modules run.
        """
        with self.held.whole():
            place = self._place_of(batches).forward
            running = _RunningPlan(self, place, batches, model=model, trains=False, alone=alone)
            running.execute(0)
        self.clock.take()  # Of no step.
        running.count_losses_once()
        dist.all_reduce(running.totals, group=self.mesh.group)
        self.lanes.wait_for_sends()
        return running.totals_of_loss[1:]

    def _place_of(self, batches: Sequence[RankBatch]) -> Place:
        """The place in the Program of a step."""
        return self.place.under(batches[0].decision.program)


class _RunningPlan:
    """One step while it runs.

    totals: float64 [7 + generators], squared gradient norm, sum of the loss, number of targets, bytes sent by kind
            (_SENT), and the sum of each generator's loss; of this rank, after `end` of all.
    place: in the Program of the step.
    model: has the modules to run, by default those of the step. trains: False runs forward passes alone.
    alone: as of `PlannedStep.evaluate`.
    """

    def __init__(
        self,
        step: PlannedStep,
        place: Place,
        batches: Sequence[RankBatch],
        *,
        model: Model | None = None,
        trains: bool = True,
        alone: Set[str] | None = None,
    ) -> None:
        mesh, model = step.mesh, model or step.model
        compute = step.held.types.compute
        self.step, self.place = step, place
        batches = [step._shared(batch) for batch in batches]
        self.batches = [batch.to(mesh.device, dtype=compute) for batch in batches] if compute else batches
        for _, parameter in step.parameters.values():
            parameter.grad = None
        if trains:
            step.held.begin(batches)
        assignment = assignment_of(batches)
        together = gathered(place.program.layout.plan, assignment)
        self.gathering = Gathering(
            place,
            step.groups.gathered if alone is None else {},
            lambda name, *where: GatheredRows.of(assignment.modules[name], together.modules[name], *where),
            step.like,
            step.groups.sent,
        )
        self.lengths = assignment.batch
        self.num_targets = int(self.lengths.num_targets.sum())
        self.made = {
            name: MadeRows(int(self.lengths.items[name].length.sum()), weight) for name, weight in step.weights.items()
        }
        self.scale = step.loss_scale.value if step.loss_scale else 1.0
        self.totals = torch.zeros(_SENT.stop + len(self.made), dtype=torch.float64, device=mesh.device)
        self.stages = {
            number: SectionedStage(
                [
                    self._section(span, model, stage.unit)
                    for span in step.spans[number]
                    if alone is None or (span.makes and span.module in alone)
                ],
                trains and stage.has_backward,
                mesh.device,
            )
            for number, stage in place.stages.items()
        }
        self.tensors = StageTensors()

        def parts(edge: int, microbatch: int, shares: Shares) -> list[MessagePart]:
            source, sink = place.program.ends(edge)
            of_edge = together if comes_together(place.program.layout, source, sink) else assignment
            context = batches[microbatch].sequences.context
            own_rows = None if context is None else len(context.own)
            every = message_parts(place.program, of_edge, edge, place.island, microbatch, shares, own_rows)
            return [part for part in every if alone is None or part.module in alone & source.layers.keys()]

        self.messages = Messages(place, step.lanes, parts, self.tensors, step.like)
        modules = modules_by_phase(model)
        self.rows = {name: getattr(modules[name], "row_parts", None) for name in place.modules}  # Generators have none.
        self.paused: dict[tuple[int, Kind, int], PausedPass] = {}
        self.reduced: set[int] = set()
        self.has_ended = False

    def _section(self, span: BlockSpan, model: Model, unit: Unit) -> Section:
        made, without_rows = self.made.get(span.module), None
        if span.module == BACKBONE:
            without_rows = self.step.without_rows if unit.ep > 1 else None
        elif made is None and not span.enters and can_share_items(self.place.program.layout.plan, span.module):
            layer, needs_gradient = self.step.spec.sent(span.module, max(span.first, 1))
            without_rows = self.step.like.new_empty(0, layer.output_width).requires_grad_(needs_gradient)
        if made is None:
            return Section(span, model, self.totals, self.scale / max(self.num_targets, 1), without_rows)
        of_generator = self.totals[_SENT.stop + list(self.made).index(span.module)]
        loss_gradient = self.scale * made.weight / max(made.num_rows, 1)
        return Section(span, model, self.totals, loss_gradient, without_rows, made=of_generator)

    @property
    def totals_of_loss(self) -> Tensor:
        """The totals without the bytes: by them a step is finite."""
        return torch.cat([self.totals[: _SENT.start], self.totals[_SENT.stop :]])

    def execute(self, step: int, leave_out: Iterable[Kind] = ()) -> None:
        """Execute the row. leave_out: kinds that are not executed."""
        clock, row, device = self.step.clock, self.place.row, self.step.mesh.device
        kind, self.stream = device.type, torch.cuda.current_stream(device) if device.type == "cuda" else None
        self.autocast = kind, torch.get_autocast_dtype(kind), torch.is_autocast_enabled(kind)
        self.executor = Executor(row, self.handlers, clock, leave_out=leave_out, in_parts=_IN_PARTS)
        try:
            self.executor.run(step)
        finally:
            for paused in self.paused.values():  # None is left unless the row has failed.
                paused.leave()

    @property
    def handlers(self) -> Mapping[Kind, Handler]:
        """What each kind of action calls; built anew, as in `step.py`."""
        passes = {Kind.F: self.forward, Kind.R: self.recompute, Kind.B: self.backward}
        halves = {Kind.I: self.backward_input, Kind.W: self.backward_weight}
        passes = {kind: partial(self._in_one_call, handler) for kind, handler in (passes | halves).items()}
        collectives = {Kind.GATHER: self.gather, Kind.GATHER_B: self.gather, Kind.REDUCE: self.reduce}
        return {**passes, **self.messages.handlers, **collectives, Kind.STEP: self.update}

    def _in_one_call(self, handler: Handler, action: Action) -> None:
        """Run a pass, or a part of one; of parts of which the pass runs in one call, all at the first."""
        stage = self.place.stages[action.stage]
        if action.part >= 0 and stage.has_sums:
            self._go_on(handler, action)
            return
        if action.part < 0 or not stage.has_halves:
            handler(action)
            return
        rows = self.rows[BACKBONE] if action.kind in (Kind.F, Kind.B, Kind.I) else None
        with PartedPass(action, stage.num_parts, self._reach).beside(rows):
            handler(action._replace(part=-1))

    def _reach(self, part: Action) -> None:
        """Run the row up to a later part of the pass that runs."""
        deferred = self.step.deferred
        # What runs inside I leaves nothing to W. Backward runs in a thread of torch's on GPUs, which has no autocast.
        with nullcontext() if deferred is None else deferred.into(None), self._autocast():
            self.executor.reach(part)

    def _autocast(self) -> AbstractContextManager[Any]:
        """What the step runs in, for other threads."""
        kind, dtype, is_on = self.autocast
        return torch.autocast(kind, dtype, cache_enabled=False) if is_on else nullcontext()

    def _go_on(self, handler: Handler, action: Action) -> None:
        """Go on with a pass whose sums are apart, up to its next one.

        A sum's own part has nothing to do: the part before it has started the sum, and the part behind it waits for it.
        """
        key, (number, is_sum), stage = action[:3], divmod(action.part, 2), self.place.stages[action.stage]
        if is_sum:
            return
        if number == 0:
            rows = [each for name in stage.layers if (each := self.rows[name]) is not None]
            self.paused[key] = PausedPass(partial(self._block_by_block, handler, action), rows, self.step.threads)
        self.paused[key].go_on(number)
        if action.part == stage.num_parts - 1:
            del self.paused[key]

    def _block_by_block(self, handler: Handler, action: Action, paused: PausedPass) -> None:
        """All of a pass whose sums are apart, in a thread of its own."""
        # Torch would run backward in its own thread of a GPU, in which the backbone's may be running.
        with torch.cuda.stream(self.stream), self._autocast(), torch.autograd.set_multithreading_enabled(False):
            for block in range(self._last_part(action.stage) + 1):
                paused.until(BLOCK_SUMS * block)
                handler(action._replace(part=block))

    def _pausing(self, action: Action, section: Section) -> AbstractContextManager[None]:
        """What a section runs in: inside blocks, a pass whose sums are apart pauses at these."""
        paused = self.paused.get(action[:3])
        if paused is None or section.span.first == section.span.stop:
            return nullcontext()
        return paused.pausing(BLOCK_SUMS * (action.part + 1))

    def forward(self, action: Action) -> None:
        """Run a stage on what arrived."""
        key = action.stage, action.microbatch
        inputs = self.tensors.inputs.pop(key, {})
        self.step.held.use(action.stage)
        around = partial(self._pausing, action)
        outputs, runs = self.stages[action.stage].forward(self.batches[action.microbatch], inputs, action.part, around)
        if runs:
            self.tensors.runs.setdefault(key, []).extend(runs)
        if not self._ends_pass(action):
            self.tensors.inputs[key] = outputs
            return
        self.step.held.release(*key)
        self.messages.made_outputs(*key, self.gathering.outputs(*key, outputs))

    def recompute(self, action: Action) -> None:
        """Run what forward did not keep again."""
        runs = self.tensors.runs.get((action.stage, action.microbatch), [])
        self.step.held.use(action.stage)
        self.stages[action.stage].recompute(self.batches[action.microbatch], runs)

    def backward(self, action: Action) -> None:
        """Run a stage's backward pass."""
        self._backward(action, partial(self._pausing, action))

    def backward_input(self, action: Action) -> None:
        """As `backward`, with gradients of weights left for W."""
        assert self.step.deferred is not None, "a row with I has a W"
        deferred, products = self.step.deferred, self.tensors.products.setdefault((action.stage, action.microbatch), [])

        def deferring(section: Section) -> AbstractContextManager[None]:
            # Those of the output layer do not wait: they would keep the gradients of logits, which are larger than all
            # that the stage keeps for backward (`Layer.defers_weights`).
            return nullcontext() if section.sees_targets else deferred.into(products)

        self._backward(action, deferring)

    def backward_weight(self, action: Action) -> None:
        """Compute what I has left."""
        for product in self.tensors.products.pop((action.stage, action.microbatch), []):
            product.add()
        self.step.held.collect(action.stage)

    def _backward(self, action: Action, around: Around) -> None:
        """From the gradients that arrived, or from the loss."""
        key = action.stage, action.microbatch
        runs, gradients = self._taken_runs(action), self.tensors.output_gradients.pop(key, {})
        if action.part <= 0:
            gradients = self.gathering.gradients(*key, gradients)
        for run in runs:
            if run.section.takes_loss and run.root is not None:
                gradients[run.section.output] = run.root.filled(run.section.loss_gradient)
        self.step.held.use(action.stage)
        # Programs have no R of encoders in bubbles: their B recomputes, and is priced so.
        self.stages[action.stage].recompute(self.batches[action.microbatch], runs)
        gradients = self.stages[action.stage].backward(runs, gradients, around)
        self.step.held.collect(action.stage)
        if not self._ends_pass(action):
            self.tensors.output_gradients[key] = gradients
            return
        self.step.held.release(*key)
        self.messages.made_gradients(*key, gradients)

    def _ends_pass(self, action: Action) -> bool:
        """Whether it is a whole pass, or the last part of one, which then ends."""
        if 0 <= action.part < self._last_part(action.stage):
            return False
        if (paused := self.paused.get(action[:3])) is not None:
            paused.until(BLOCK_SUMS * (action.part + 1))
        return True

    def _last_part(self, stage: int) -> int:
        """The number of the last part of a stage's passes, as `parts_of` cuts them."""
        return self.step.spans[stage][-1].part

    def _taken_runs(self, action: Action) -> list[SectionRun]:
        """The runs that a backward pass, or a part of one, goes through; they are taken away."""
        key = action.stage, action.microbatch
        runs = self.tensors.runs.pop(key, [])
        if action.part < 0:
            return runs
        part = self._last_part(action.stage) - action.part
        if left := [run for run in runs if run.section.span.part != part]:
            self.tensors.runs[key] = left
        return [run for run in runs if run.section.span.part == part]

    def gather(self, action: Action) -> None:
        """Start to gather the parameters of a stage."""
        self.step.held.gather(action, self.batches)

    def reduce(self, action: Action) -> None:
        """Start to sum the gradients of a stage over its replicas."""
        self._check_no_products(action.stage, action.microbatch)
        self.step.held.reduce(action, self.batches)

    def update(self, action: Action) -> None:
        """Sum what is to be summed over ranks, clip, and step the optimizer, unless the step is not finite."""
        assert self.step.optimizer is not None
        self.end()
        update_if_finite(self.step.optimizer, self.totals_of_loss)
        self.step.held.updated()

    def end(self) -> None:
        """Sum gradients that are left, and the totals, then clip. A collective; the second call does nothing."""
        if self.has_ended:
            return
        self.has_ended = True
        for stage in self.stages:
            self._check_no_products(stage)
        mesh = self.step.mesh
        self.totals[0] = self.step.held.finish(mesh.device)
        self.count_losses_once()
        sent_bytes = self.messages.sent_bytes, self._exchanged_bytes(), *self.step.held.sent.take()
        self.totals[_SENT] = on_device(torch.tensor(sent_bytes, dtype=torch.float64), mesh.device)
        dist.all_reduce(self.totals, group=mesh.group)
        self.step.clock.meet(restarts=True)
        self.step.lanes.wait_for_sends()
        parameters = [parameter for _, parameter in self.step.parameters.values()]
        unscale_and_clip(parameters, self.totals[0], self.step.max_grad_norm, self.scale)

    def _exchanged_bytes(self) -> float:
        """Bytes that this rank has given to others that share its sequences, items, layers, or experts."""
        return sum(batch.shared_bytes for batch in self.batches) + sum(self.step.groups.sent)

    def count_losses_once(self) -> None:
        """Leave the loss and the targets to the first of the tensor-parallel ranks, which all compute the same loss."""
        if self.place.t:
            self.totals[1 : _SENT.start] = self.totals[_SENT.stop :] = 0

    def _check_no_products(self, stage: int, microbatch: int = -1) -> None:
        """Raise RuntimeError if gradients of weights of a stage still wait: of a microbatch, or (-1) of any."""
        for number, waiting in self.tensors.products:
            if number == stage and microbatch in (-1, waiting):
                raise RuntimeError(f"{Action(stage, Kind.W, waiting)} has not run; gradients of weights are missing.")
