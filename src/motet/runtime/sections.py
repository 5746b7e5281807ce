"""A stage as sections: spans of blocks of modules, each run on inputs that are detached from what came before.

A section is what is recomputed as a whole: its forward pass keeps its inputs alone, and R runs it again with a graph.
So a stage of which some blocks are recomputed has a section for them and others for the rest. What stands before and
behind the blocks is not recomputed, as in `cost/memory.py: stage_layers`.

Tensors between sections and stages go by the module whose output, or unfinished hidden states, they are.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from itertools import pairwise
from typing import Any, Protocol, TypeAlias, cast

import torch
from torch import Tensor

from motet.ahead import finding
from motet.core.arrays import Int64Array
from motet.core.spec import ModelSpec, Module
from motet.core.workload import BACKBONE
from motet.dispatch.batch import PackedSequences, RankBatch
from motet.dispatch.shared_items import SharedItems
from motet.dropout import drawing
from motet.runtime.stage import Model, modules_by_phase
from motet.runtime.tensors import Root
from motet.schedule import PlannedStage, parts_of
from motet.tensor_parallel import RowParts


class CuttableBlock(Protocol):
    """A block of an encoder. half: which half it runs: attention (0), its MLP (1), or both (-1)."""

    half: int


class CuttableEncoder(Protocol):
    """An encoder with its projector, whole or in parts; the parts in turn do what the whole does.

    row_parts: as of `CuttableBackbone`.
    num_encoder_blocks: how many of the blocks are the encoder's; those behind are its projector's.
    goes_on:   whether `through` up to a block also runs what stands before a projector's blocks.
    """

    blocks: Sequence[CuttableBlock]
    row_parts: RowParts | None
    num_encoder_blocks: int

    def goes_on(self, stop: int) -> bool: ...

    def __call__(self, values: Tensor, sizes: Tensor, shared: SharedItems | None = None) -> Tensor: ...
    def enter(self, values: Tensor, sizes: Tensor, shared: SharedItems | None = None) -> Tensor: ...
    def through(
        self, hidden: Tensor, sizes: Tensor, first: int, stop: int, shared: SharedItems | None = None
    ) -> Tensor: ...
    def leave(self, hidden: Tensor, sizes: Tensor, shared: SharedItems | None = None) -> Tensor: ...


class LossOfLayers(Protocol):
    """A loss of layers, to which backward gets by itself. value: the sum over the layers that ran."""

    @property
    def value(self) -> Tensor | float: ...


class CuttableBackbone(Protocol):
    """The LLM in parts. `leave` returns the sum of the loss, and the number of targets.

    router_loss: that of routers in a pass whose loss has this gradient; None if there is none.
    row_parts:   the rows that tensor-parallel ranks share; None if there are no such ranks.
    """

    row_parts: RowParts | None

    def router_loss(self, sequences: PackedSequences, gradient: float | None = None) -> LossOfLayers | None: ...
    def enter(self, sequences: PackedSequences, features: dict[str, Tensor]) -> Tensor: ...
    def through(
        self,
        hidden: Tensor,
        sequences: PackedSequences,
        first: int,
        stop: int,
        features: dict[str, Tensor],
        router_loss: Any = None,
    ) -> Tensor: ...
    def leave(self, hidden: Tensor, sequences: PackedSequences) -> tuple[Tensor, int]: ...
    def condition(self, name: str, hidden: Tensor, sequences: PackedSequences) -> Tensor: ...


class CuttableGenerator(Protocol):
    """A generator with its output projector, whole or in parts; the parts in turn do what the whole does.

    Arguments: as of `stage.GeneratorPart`. Hidden states are of each item's rows and of those of its condition, and of
    one row more that steers the blocks, [rows, width].
    """

    def __call__(self, values: Tensor, sizes: Tensor, rows: Tensor, keys: Int64Array, counts: Int64Array) -> Tensor: ...
    def enter(self, values: Tensor, sizes: Tensor, rows: Tensor, keys: Int64Array, counts: Int64Array) -> Tensor: ...
    def through(self, hidden: Tensor, sizes: Tensor, counts: Int64Array, first: int, stop: int) -> Tensor: ...
    def leave(self, hidden: Tensor, values: Tensor, sizes: Tensor, keys: Int64Array, counts: Int64Array) -> Tensor: ...


@dataclass(frozen=True)
class BlockSpan:
    """What a section runs of a module: blocks, with what stands before (enters) and behind them (leaves).

    is_whole:     the module is run in one call, as it may have no parts.
    sources:      modules whose outputs it takes in: those that feed it if it enters, and those that enter again here.
    kept:         those of them that enter again behind it.
    is_trainable: whether any parameter of the blocks is updated.
    part:         the part of the stage's forward pass that it belongs to.
    begins_inside, ends_inside: as in `PlannedStage`, of its first block and of its last one.
    gives:        the generator to which it gives the backbone's rows at its queries or of turns; "" for any other.
    makes:        it is of a generator: what that takes in is what it is given, and goes by its own name.
    has_backward: whether any parameter of the module is updated, or a gradient of what it takes in is needed.
    comes_on, goes_on: of an encoder that tensor-parallel ranks share, the stage's section before it, or behind it, is
                  of its blocks, too: between them each rank may have a part of the rows.
    """

    module: str
    first: int
    stop: int
    enters: bool
    leaves: bool
    is_whole: bool
    sources: tuple[str, ...]
    is_recomputed: bool
    is_trainable: bool
    kept: tuple[str, ...] = ()
    part: int = 0
    begins_inside: bool = False
    ends_inside: bool = False
    gives: str = ""
    makes: bool = False
    has_backward: bool = True
    comes_on: bool = False
    goes_on: bool = False

    @property
    def output(self) -> str:
        """The name of the tensor that it makes."""
        return self.gives or self.module

    @property
    def takes_loss(self) -> bool:
        """Whether that tensor is the sum of a loss."""
        return self.leaves and (self.makes or (self.module == BACKBONE and not self.gives))

    @property
    def sees_targets(self) -> bool:
        """Whether it is the backbone's output layer with its loss."""
        return self.takes_loss and not self.makes

    @property
    def taken(self) -> tuple[str, ...]:
        """Names of the tensors that it takes in."""
        return self.sources if self.enters and not self.makes else (self.module, *self.sources)


def spans_of(stage: PlannedStage, model: ModelSpec) -> Iterator[BlockSpan]:
    """The sections of a stage, in the order in which they run. What takes the loss is one of its own, and so is what
    stands behind the blocks of an encoder whose sums are apart: its own sum is waited for.

    Raises ArgumentError for parts of passes that are no blocks and no halves of blocks.
    """
    spans = list(_spans_of(stage, model))
    joined = [_is_joined(stage, *pair) for pair in pairwise(spans)]
    for span, comes_on, goes_on in zip(spans, [False, *joined], [*joined, False], strict=True):
        yield replace(span, comes_on=comes_on, goes_on=goes_on)


def _is_joined(stage: PlannedStage, span: BlockSpan, behind: BlockSpan) -> bool:
    """Whether rows between two sections may stay in parts: both are of blocks of an encoder.

    Where its sums are apart, rows are whole: each gather would be waited for, where now a whole sum is beside the row.
    """
    can_stay = stage.unit.tp > 1 and not (span.makes or stage.has_sums)
    is_encoder = span.module == behind.module != BACKBONE
    return can_stay and is_encoder and span.first < span.stop and behind.first < behind.stop


def _spans_of(stage: PlannedStage, model: ModelSpec) -> Iterator[BlockSpan]:
    for number, part in enumerate(parts_of(stage, model)):
        spans = list(_spans_of_part(part, model))
        if part.begins_inside:
            spans[0] = replace(spans[0], begins_inside=True)
        if part.ends_inside:
            spans[-1] = replace(spans[-1], ends_inside=True)
        yield from (replace(span, part=number) for span in spans)


def _spans_of_part(stage: PlannedStage, model: ModelSpec) -> Iterator[BlockSpan]:
    for name, (first, stop) in stage.layers.items():
        if name in model.generators:
            # Its blocks are recomputed inside its backward pass (`planned_step.py`).
            ends = first == 0, stop == len(model.module(name).blocks)
            yield replace(_span(model, name, (first, stop), *ends, is_whole=all(ends)), sources=(), makes=True)
            continue
        module, num_recomputed = model.module(name), stage.recomputed.get(name, 0)
        enters = first == 0 and not (stage.begins_inside and name == stage.modules[0])
        is_last = stop == len(module.blocks) and not (stage.ends_inside and name == stage.modules[-1])
        takes_loss = is_last and name == BACKBONE
        leaves_apart = is_last and stage.has_sums
        leaves = is_last and not takes_loss and not leaves_apart
        is_whole = enters and leaves
        cut = first + num_recomputed
        if not num_recomputed or (is_whole and not is_layered(module)):
            is_recomputed = num_recomputed > 0
            yield _span(model, name, (first, stop), enters, leaves, is_whole=is_whole, is_recomputed=is_recomputed)
        else:
            if enters:
                yield _span(model, name, (first, first), True, False)
            yield _span(model, name, (first, cut), False, False, is_recomputed=True)
            if cut < stop or leaves:
                yield _span(model, name, (cut, stop), False, leaves)
        if leaves_apart:
            yield _span(model, name, (stop, stop), False, True)
        if takes_loss:
            for generator in model.generators:
                given = _span(model, name, (stop, stop), False, False)
                yield replace(given, gives=generator, kept=(BACKBONE,))
            yield _span(model, name, (stop, stop), False, True)


def is_layered(module: Module) -> bool:
    """Whether a module has transformer layers, which are recomputed without what stands before and behind them."""
    return any(layer.attention is not None for layer in module.layers)


def _span(
    model: ModelSpec,
    name: str,
    blocks: tuple[int, int],
    enters: bool,
    leaves: bool,
    *,
    is_whole: bool = False,
    is_recomputed: bool = False,
) -> BlockSpan:
    module = model.module(name)
    is_trainable = any(module.layers[index].trainable for index in module.block_layers(*blocks))
    entries = {source: model.entries(source, name) for source in model.sources(name)}
    here = range(0 if enters else blocks[0], max(blocks[1], int(enters)))
    sources = tuple(each for each in entries if any(block in here for block in entries[each]))
    kept = tuple(each for each in sources if entries[each][-1] >= blocks[1])
    has_backward = module.trainable or model.input_gradients[name][0]
    return BlockSpan(
        name, *blocks, enters, leaves, is_whole, sources, is_recomputed, is_trainable, kept, has_backward=has_backward
    )


class Section:
    """A span of blocks with its module, and what a pass asks of the span. totals: float64 [>= 3], to which the loss and
    the targets are added.

    made: of a generator the float64 scalar to which its loss is added; else unused.
    loss_gradient: that of the sum of the loss.
    without_rows: hidden states of no row, [0, width], of a rank that takes part in blocks where it has none: of the
                  backbone, as replicas share experts, or of an encoder, as ranks share items; None: it does not.
    """

    def __init__(
        self,
        span: BlockSpan,
        model: Model,
        totals: Tensor,
        loss_gradient: float = 1.0,
        without_rows: Tensor | None = None,
        made: Tensor | None = None,
    ) -> None:
        self.span, self.taken, self._totals, self.loss_gradient = span, span.taken, totals, loss_gradient
        self.output, self.takes_loss, self.sees_targets = span.output, span.takes_loss, span.sees_targets
        self._is_backbone, self._made = span.module == BACKBONE, made
        self.without_rows = None if (self._is_backbone and span.leaves) or span.gives else without_rows
        self._module = modules_by_phase(model)[span.module]

    def has_input(self, batch: RankBatch) -> bool:
        """Whether this rank has anything to compute in a microbatch."""
        if self.span.gives:
            context = batch.sequences.context  # Ranks that share sequences give rows to each other.
            is_collected = context is not None and self.span.gives in context.given
            return is_collected or len(batch.sequences.feature_positions[self.span.gives]) > 0
        if self._is_backbone:
            return batch.sequences.num_rows > 0 or (self.without_rows is not None and batch.lengths.num_examples > 0)
        return len(batch.media[self.span.module][1]) > 0 or self.span.module in batch.shared

    def run(self, batch: RankBatch, taken: dict[str, Tensor], *, is_again: bool = False) -> Tensor:
        """The output; of the last section of the backbone the sum of the loss. is_again: it adds to no totals."""
        with drawing(self.span.module, batch.draws), finding(self.span.module, batch.ahead):
            if self.span.makes:
                return self._run_generator(batch, taken)
            if not self._is_backbone:
                return self._run_encoder(batch, taken)
            return self._run_backbone(batch, taken, is_again)

    def _run_encoder(self, batch: RankBatch, taken: dict[str, Tensor]) -> Tensor:
        module: CuttableEncoder = self._module  # type: ignore[assignment]
        span, inputs = self.span, batch.inputs(self.span.module)
        if span.is_whole:
            return module(*inputs)
        # Encoders of one's own that cannot share items take no more than values and sizes.
        (values, sizes), shared = inputs[:2], inputs[2:]
        hidden = module.enter(values, sizes, *shared) if span.enters else taken[span.module]
        if span.first < span.stop:
            with halved(module, span), self._in_parts(module):
                hidden = module.through(hidden, sizes, span.first, span.stop, *shared)
        return module.leave(hidden, sizes, *shared) if span.leaves else hidden

    def _in_parts(self, module: CuttableEncoder) -> AbstractContextManager[None]:
        """In which the blocks run: rows stay as they are between sections, but for those of a projector's blocks."""
        span = self.span
        if not (span.comes_on or span.goes_on):
            return nullcontext()
        parts, end = module.row_parts, module.num_encoder_blocks
        assert parts is not None, "tensor-parallel ranks share its products"
        stay = span.goes_on and span.stop <= end and not module.goes_on(span.stop)
        return parts.handed(come=span.comes_on and span.first < end, stay=stay)

    def _run_generator(self, batch: RankBatch, taken: dict[str, Tensor]) -> Tensor:
        span, name, module = self.span, self.span.module, cast(CuttableGenerator, self._module)
        if batch.draws is None:
            raise ValueError(f"the generator {name!r} needs `RankBatch.draws`, by which its noise is drawn")
        (values, sizes), keys, counts = batch.media[name], batch.draws[name], batch.item_rows[name]
        if span.is_whole:
            made = module(values, sizes, taken[name], keys, counts)
        else:
            # Of a sample (`train/evaluate_planned.py`) the first pass alone is given rows.
            rows = taken.get(name, values[:0]) if span.enters else taken[name]
            hidden = module.enter(values, sizes, rows, keys, counts) if span.enters else rows
            hidden = module.through(hidden, sizes, counts, span.first, span.stop)
            made = module.leave(hidden, values, sizes, keys, counts) if span.leaves else hidden
        if span.leaves:
            assert self._made is not None, "a generator has a loss"
            self._made += made.detach()
        return made

    def _run_backbone(self, batch: RankBatch, taken: dict[str, Tensor], is_again: bool) -> Tensor:
        module: CuttableBackbone = self._module  # type: ignore[assignment]
        span, sequences = self.span, batch.sequences
        if span.gives:
            return module.condition(span.gives, taken[BACKBONE], sequences)
        hidden = module.enter(sequences, taken) if span.enters else taken[span.module]
        if span.first < span.stop:
            features = {name: rows for name, rows in taken.items() if name != span.module}
            router_loss = module.router_loss(sequences, self.loss_gradient)
            hidden = module.through(hidden, sequences, span.first, span.stop, features, router_loss)
            if router_loss is not None and not is_again:
                self._totals[1] += router_loss.value
        if not span.leaves:
            return hidden
        loss_sum, num_targets = module.leave(hidden, sequences)
        self._totals[1] += loss_sum.detach()
        self._totals[2] += num_targets
        return loss_sum


@contextmanager
def halved(module: CuttableEncoder, span: BlockSpan) -> Iterator[None]:
    """While it lasts, the first and the last block of a span run the halves that the span has of them."""
    ends = (span.begins_inside, span.first, 1), (span.ends_inside, span.stop - 1, 0)
    halves = [(module.blocks[number], half) for is_inside, number, half in ends if is_inside]
    for block, half in halves:
        block.half = half
    try:
        yield
    finally:
        for block, _ in halves:
            block.half = -1


Around: TypeAlias = Callable[[Section], AbstractContextManager[None]]


def _nothing_around(section: Section) -> AbstractContextManager[None]:
    return nullcontext()


@dataclass
class SectionRun:
    """A section that ran on a microbatch and waits for its backward pass.

    taken:  its inputs, leaves of its graph.
    root:   of its output; None if that requires no gradient, and until R, if the section is recomputed.
    random: until R, states of random number generators before it ran; empty if it is not recomputed.
    """

    section: Section
    taken: dict[str, Tensor]
    root: Root | None = None
    random: list[Tensor] = field(default_factory=list)

    def made(self, output: Tensor) -> None:
        """The section ran with a graph, which backward enters by its output."""
        self.root = Root.of(output) if output.requires_grad else None


class SectionedStage:
    """A stage on one rank. has_backward: whether a backward pass follows each forward pass."""

    def __init__(self, sections: Sequence[Section], has_backward: bool, device: torch.device) -> None:
        self._sections, self._has_backward, self._device = sections, has_backward, device

    def forward(
        self, batch: RankBatch, inputs: Mapping[str, Tensor], part: int = -1, around: Around = _nothing_around
    ) -> tuple[dict[str, Tensor], list[SectionRun]]:
        """Run the sections of a part, or (-1) all. inputs: what is there; a gradient is computed for what requires one.

        around: what each section runs in. Returns what is there behind the last section, and the runs that wait for
        backward.
        """
        held, runs = dict(inputs), []
        for section in self._sections:
            if part not in (-1, section.span.part):
                continue
            span, taken = section.span, {}
            for name in section.taken:
                if name in held:
                    taken[name] = _leaf(held[name]) if name in span.kept else _own_leaf(held.pop(name))
            if not section.has_input(batch):
                continue
            if span.module in section.taken and span.module not in taken and section.without_rows is not None:
                taken[span.module] = _leaf(section.without_rows)  # A message without rows is none.
            run = SectionRun(section, taken)
            has_backward = self._has_backward and span.has_backward
            keeps_graph = has_backward and not span.is_recomputed
            if has_backward and span.is_recomputed:
                run.random = self._random_states()
            with torch.set_grad_enabled(keeps_graph), around(section):
                output = section.run(batch, run.taken)
            if keeps_graph:
                run.made(output)
            elif has_backward:
                output.requires_grad_(span.is_trainable or any(leaf.requires_grad for leaf in run.taken.values()))
            if has_backward:
                runs.append(run)
            held[section.output] = output
        return held, runs

    def recompute(self, batch: RankBatch, runs: Sequence[SectionRun]) -> None:
        """Run sections again whose output was not kept, with a graph, and with the same random numbers."""
        for run in runs:
            if run.random:
                devices = [self._device] if self._device.type == "cuda" else []
                with torch.random.fork_rng(devices), torch.enable_grad():
                    torch.set_rng_state(run.random[0])
                    if devices:
                        torch.cuda.set_rng_state(run.random[1], self._device)
                    run.made(run.section.run(batch, run.taken, is_again=True))
                run.random = []

    def backward(
        self,
        runs: Sequence[SectionRun],
        gradients: dict[str, Tensor],
        around: Around = _nothing_around,
    ) -> dict[str, Tensor]:
        """From gradients of what was there behind the last section to those of what arrived; parameters get theirs.

        around: what each section's backward pass runs in.
        """
        for run in reversed(runs):
            assert not run.random, "a section that is recomputed runs before its backward pass"
            gradient = gradients.pop(run.section.output, None)
            if run.root is not None:
                # A message without rows is none, and in the pass other ranks wait for this one, which has no row of
                # what they share. Of a copy of a replicated encoder that nothing takes in, it runs as predicted.
                gradient = run.root.filled(0.0) if gradient is None else gradient
                with around(run.section):
                    torch.autograd.backward([run.root.edge], [gradient])
            for name, leaf in run.taken.items():
                if leaf.requires_grad:
                    own = torch.zeros_like(leaf) if leaf.grad is None else leaf.grad
                    gradients[name] = own + gradients[name] if name in gradients else own
        return gradients

    def _random_states(self) -> list[Tensor]:
        states = [torch.get_rng_state()]
        return [*states, torch.cuda.get_rng_state(self._device)] if self._device.type == "cuda" else states


def _own_leaf(tensor: Tensor) -> Tensor:
    """A leaf for what nobody else takes in: what arrived is one already."""
    return tensor if tensor.is_leaf else _leaf(tensor)


def _leaf(tensor: Tensor) -> Tensor:
    return tensor.detach().requires_grad_(tensor.requires_grad)
