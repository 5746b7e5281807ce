"""What a rank of runtime.py does: the same steps of the same model by Motet's executor and by torch's pipelining."""

from __future__ import annotations

import csv
import gzip
import json
import os
import time
from collections import defaultdict, deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
from rank_step import rank_step
from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage, schedules
from transformers import Qwen2Config, Qwen2ForCausalLM

from motet.assign.planned_step import decide_planned_step
from motet.core.example import TokenSequence
from motet.core.heap import keep_freed_memory, share_heap
from motet.core.plan import Plan, Unit
from motet.core.timeline import Timeline
from motet.core.workload import BACKBONE, BatchLengths
from motet.cost.catalogue import cluster
from motet.dispatch.batch import PackedSequences, RankBatch
from motet.dispatch.stage_batch import assemble_stages
from motet.models.attention import ATTENTION
from motet.models.backbone import Backbone
from motet.models.mllm import MLLM
from motet.models.part import keep_spans
from motet.models.spec import model_spec
from motet.runtime import deferred, sections
from motet.runtime.clip import square_sum
from motet.runtime.held import HeldParameters
from motet.runtime.p2p import POSTED_AHEAD, Lanes
from motet.runtime.place import Place
from motet.runtime.planned_step import PlannedStep
from motet.schedule.program import Kind

SCHEDULES = {
    "gpipe": (1, schedules.ScheduleGPipe, 1),
    "1f1b": (1, schedules.Schedule1F1B, 1),
    "interleaved_1f1b": (2, schedules.ScheduleInterleaved1F1B, 2),
    "zb_h1": (1, schedules.ScheduleInterleavedZeroBubble, 2),
    "zb_v": (2, schedules.ScheduleZBVZeroBubble, 2),
}
"""Schedule of a Plan -> stages a rank, torch's class that is nearest to it, and stages a rank of that."""
IN_HALVES = ("zb_h1", "zb_v")
"""Their backward passes come in two halves."""
NUM_BLOCKS, DIM, VOCABULARY = 8, 256, 512
NUM_MICROBATCHES, NUM_BATCHES = 8, 5
LENGTH, LONGEST, SHRINK = 256, 1024, 4
"""Of equal lengths; of ragged ones, which are divided by SHRINK."""
WAITS = (Kind.RECV_F, Kind.RECV_B)
WARM_UP = 2
SAME = 1e-4
"""Relative difference of losses: float32, and attention over padding takes other kernels."""


@dataclass(frozen=True)
class Work:
    """lengths: of the sequences of all batches; None: all LENGTH."""

    schedule: str
    num_pairs: int
    seed: int
    lengths: tuple[int, ...] | None


def lengths_of(table: Path, seed: int) -> tuple[int, ...]:
    """Real lengths of sequences, drawn from a table."""
    with gzip.open(table, "rt") as file:
        tokens = [int(row["text_tokens"] or 0) + int(row["image_tokens"] or 0) for row in csv.DictReader(file)]
    kept = np.clip(np.array(tokens) // SHRINK, 4, LONGEST)
    return tuple(np.random.default_rng(seed).choice(kept, NUM_BATCHES * NUM_MICROBATCHES).tolist())


def run_rank(rank: int, num_ranks: int, rendezvous: str, work: Work, out: Path) -> None:
    """Run pairs of steps; rank 0 writes seconds of the slower rank, and of rank 0's actions outside modules."""
    torch.set_num_threads(1)
    share_heap(), keep_freed_memory()
    cores = sorted(os.sched_getaffinity(0))
    if len(cores) >= num_ranks:
        os.sched_setaffinity(0, {cores[rank]})
    dist.init_process_group("gloo", rank=rank, world_size=num_ranks, init_method=rendezvous)
    lengths = work.lengths or (LENGTH,) * (NUM_BATCHES * NUM_MICROBATCHES)
    batches = [lengths[first : first + NUM_MICROBATCHES] for first in range(0, len(lengths), NUM_MICROBATCHES)]
    rng = np.random.default_rng(work.seed)
    tokens = [[rng.integers(0, VOCABULARY, length) for length in batch] for batch in batches]
    ours, theirs = Ours(work.schedule, rank, tokens), Theirs(work.schedule, rank, tokens, max(lengths))
    sides: dict[str, Callable[[int], float]] = {"ours": ours.run, "theirs": theirs.run}
    if work.lengths is None and work.schedule not in IN_HALVES:
        sides["by_hand"] = ByHand(ours.step, ours.batches).run
    figures: dict[str, list[float]] = defaultdict(list)
    for number in range(-WARM_UP, work.num_pairs):
        losses, found = {}, {}
        names = list(sides)
        for name in names[number % len(names) :] + names[: number % len(names)]:  # Each is first in turn.
            dist.barrier()
            processor_s = time.process_time()
            with timed(messages=name != "theirs") as spent:
                losses[name] = sides[name](number % len(batches))
            taken_s = [spent.all.wall_s, time.process_time() - processor_s, losses[name]]
            slowest = torch.tensor(taken_s, dtype=torch.float64)
            dist.all_reduce(slowest, dist.ReduceOp.MAX)
            found[f"{name}_s"], found[f"{name}_processor_s"], losses[name] = slowest.tolist()
            found[f"{name}_outside_s"] = (spent.all.processor_s - spent.modules.processor_s) / ours.num_actions
            if name == "ours":
                found["messages_s"] = spent.messages.processor_s / ours.num_actions
                found["norm_s"] = spent.norm.processor_s / ours.num_actions
                outside_s = spent.all.wall_s - spent.modules.wall_s - ours.received_s
                found["overhead_s"] = outside_s / ours.num_actions
                found["sums_s"] = spent.sums.wall_s / ours.num_actions
        if max(losses.values()) - min(losses.values()) > SAME * losses["theirs"]:
            raise SystemExit(f"losses differ, {losses}: the sides do not run the same steps")
        if number < 0 and abs(theirs.square_norm() / ours.square_norm - 1) > SAME:
            raise SystemExit("gradients differ: the sides do not run the same steps")
        for name, value in found.items() if number >= 0 else ():
            figures[name].append(value)
    if rank == 0:
        out.write_text(json.dumps(figures), encoding="utf-8")
    dist.destroy_process_group()


def build_model() -> MLLM:
    """The same weights in every call."""
    torch.manual_seed(0)
    config = Qwen2Config(
        vocab_size=VOCABULARY,
        hidden_size=DIM,
        intermediate_size=4 * DIM,
        num_hidden_layers=NUM_BLOCKS,
        num_attention_heads=4,
        num_key_value_heads=4,
        attn_implementation=ATTENTION,
    )
    return MLLM({}, Backbone(Qwen2ForCausalLM(config)))


def plan_of(schedule: str) -> Plan:
    num_stages = 2 * SCHEDULES[schedule][0]
    stages = ({BACKBONE: NUM_BLOCKS // num_stages},) * num_stages
    where = cluster("cpu", 1, 2)
    units = (Unit("llm", stages, pp=2, zero=0),)
    return Plan(model_spec(build_model()), where, units, NUM_MICROBATCHES, 1, schedule, precision="fp32")


class Ours:
    """Steps by `PlannedStep`.

    square_norm: of all gradients, in the last step.
    """

    def __init__(self, schedule: str, rank: int, tokens: Sequence[Sequence[np.ndarray]]) -> None:
        plan = plan_of(schedule)
        self.step = rank_step(plan, build_model(), rank)
        self._place = self.step.place
        self.batches = [self._microbatches(plan, batch) for batch in tokens]
        self.num_actions = len(self._place.row.row)
        self.square_norm = 0.0
        self._timeline = Timeline.of()

    def _microbatches(self, plan: Plan, tokens: Sequence[np.ndarray]) -> list[RankBatch]:
        count = np.array([len(each) for each in tokens])
        lengths = BatchLengths(count, count - 1, np.zeros(len(count), np.int32), {})
        parts = decide_planned_step(plan, lengths).microbatches
        return [
            assemble_stages(
                part.decision,
                part.lengths,
                self._place.replicas,
                [sequence(tokens[number]) for number in part.examples],
                {},
                {},
            )
            for part in parts
        ]

    def run(self, number: int) -> float:
        """The mean loss."""
        result = self.step.run(self.batches[number])
        self.square_norm, self._timeline = result.grad_norm**2, result.timeline
        return result.loss

    @property
    def received_s(self) -> float:
        """Seconds of the last step in which this rank waited for messages."""
        return sum(span.duration_s for span in self._timeline if span.kind in WAITS)


class ByHand:
    """Steps of the same row with torch's calls alone: modules, messages, backward, the norm and the sum over ranks.

    Nothing is checked, named, timed or kept for others, and a message is of one known shape. So what a step takes
    outside of modules is what torch's calls take by themselves: messages, their memory, graphs that are let go.
    """

    def __init__(self, step: PlannedStep, batches: Sequence[Sequence[RankBatch]]) -> None:
        self._place, self._batches = step.place, batches
        self._totals = torch.zeros(7, dtype=torch.float64)
        self._sections = {
            number: [sections.Section(span, step.model, self._totals) for span in spans]
            for number, spans in step.spans.items()
        }
        self._parameters = [parameter for _, parameter in step.parameters.values()]
        self._lanes = [dist.new_group([0, 1]) for _ in range(2)]
        """By their senders."""

    def run(self, number: int) -> float:
        """The mean loss."""
        rank, batches = self._place.rank, self._batches[number]
        peer, row = 1 - rank, self._place.row.row
        for parameter in self._parameters:
            parameter.grad = None
        self._totals.zero_()
        of_loss = torch.tensor(1 / sum(int(batch.lengths.num_targets.sum()) for batch in batches))
        to_post = deque(len(batches[a.microbatch].sequences.tokens) for a in row if a.kind in WAITS)
        posted: deque[tuple[dist.Work, Tensor]] = deque()
        sent: list[tuple[dist.Work, Tensor]] = []
        inputs: dict[tuple[int, int], Tensor] = {}
        outputs: dict[tuple[int, int], Tensor] = {}
        gradients: dict[tuple[int, int], Tensor] = {}

        def post() -> None:
            if to_post:
                message = torch.empty(to_post.popleft(), DIM)
                posted.append((dist.irecv(message, peer, group=self._lanes[peer]), message))

        def receive() -> Tensor:
            work, message = posted.popleft()
            post()
            work.wait()
            return message

        def send(message: Tensor) -> None:
            sent.append((dist.isend(message, peer, group=self._lanes[rank]), message))

        for _ in range(POSTED_AHEAD):
            post()
        for action in row:
            key = action.stage, action.microbatch
            if action.kind is Kind.F:
                hidden = inputs[key].requires_grad_() if key in inputs else None
                for section in self._sections[action.stage]:
                    hidden = section.run(batches[action.microbatch], {} if hidden is None else {BACKBONE: hidden})
                assert hidden is not None
                outputs[key] = hidden
            elif action.kind is Kind.B:
                torch.autograd.backward(outputs.pop(key), gradients.pop(key, of_loss))
            elif action.kind is Kind.SEND_F:
                send(outputs[key].detach())
            elif action.kind is Kind.SEND_B:
                gradient = inputs.pop(key).grad
                assert gradient is not None
                send(gradient)
            elif action.kind in WAITS:
                (inputs if action.kind is Kind.RECV_F else gradients)[key] = receive()
        self._totals[0] = square_sum(self._parameters, 1, self._totals.device)
        dist.all_reduce(self._totals)
        for work, _ in sent:
            work.wait()
        return float(self._totals[1] / self._totals[2])


@dataclass
class Spent:
    """Seconds of this thread: by the clock, and of the processor, which waiting takes none of."""

    wall_s: float = 0.0
    processor_s: float = 0.0

    @contextmanager
    def counting(self) -> Iterator[None]:
        """Add the seconds of the block."""
        start_s, processor_s = time.perf_counter(), time.thread_time()
        try:
            yield
        finally:
            self.wall_s += time.perf_counter() - start_s
            self.processor_s += time.thread_time() - processor_s


@dataclass
class StepSpent:
    """Of a step: all, and what of it modules' passes take, torch's calls for messages, sums over ranks with the last
    messages, and the norm of gradients.
    """

    all: Spent = field(default_factory=Spent)
    modules: Spent = field(default_factory=Spent)
    messages: Spent = field(default_factory=Spent)
    sums: Spent = field(default_factory=Spent)
    norm: Spent = field(default_factory=Spent)


@contextmanager
def timed(*, messages: bool = True) -> Iterator[StepSpent]:
    """Count what a step in the block takes. messages: torch's schedules take no other functions than torch's own."""
    spent = StepSpent()
    passes = [(sections.Section, "run"), (deferred.WeightProduct, "add"), (Part, "forward"), (Part, "loss")]
    counted = {
        "modules": [*passes, (torch.autograd, "backward"), (torch.autograd, "grad")],
        "messages": [(dist, "isend"), (dist, "irecv")] if messages else [],
        "sums": [(dist, "all_reduce"), (Lanes, "wait_for_sends")],
        "norm": [(HeldParameters, "finish")],
    }
    with ExitStack() as stack:
        for name, functions in counted.items():
            for owner, attribute in functions:
                function = getattr(owner, attribute)
                stack.callback(setattr, owner, attribute, function)
                setattr(owner, attribute, getattr(spent, name).counting()(function))
        with spent.all.counting():
            yield spent


def sequence(tokens: np.ndarray) -> TokenSequence:
    """Text of which all but the first token are targets."""
    return TokenSequence(tokens, np.arange(len(tokens)) > 0, (), np.zeros(0, np.int64))


class Part(nn.Module):
    """One of torch's stages: a span of blocks, on sequences of one length. The last one is followed by `loss`.

    copies: its output is no view, as torch's backward passes in halves cannot detach one.
    """

    def __init__(self, span: tuple[int, int], length: int, *, copies: bool) -> None:
        super().__init__()
        self.copies = copies
        model = build_model()
        keep_spans(model, {BACKBONE: span})
        self.backbone, self.span, self.length = model.backbone, span, length

    def packed(self, tokens: Tensor) -> PackedSequences:
        """tokens: LongTensor [1, length]; -1 is padding."""
        is_target = tokens[0] >= 0
        is_target[0] = False
        return PackedSequences(tokens[0].clamp(min=0), is_target, torch.tensor([0, self.length], dtype=torch.int32), {})

    def forward(self, given: Tensor) -> Tensor:
        """given: tokens [1, length] of the first stage, else hidden states [1, length, DIM]."""
        if self.span[0] == 0:
            sequences = self.packed(given)
            hidden = self.backbone.enter(sequences, {})
        else:
            sequences = self.packed(torch.zeros(1, self.length, dtype=torch.int64))
            hidden = given[0]
        hidden = self.backbone.through(hidden, sequences, *self.span)[None]
        return hidden.clone() if self.copies else hidden

    def loss(self, hidden: Tensor, tokens: Tensor) -> Tensor:
        """Summed over targets."""
        return self.backbone.leave(hidden[0], self.packed(tokens))[0]


class Theirs:
    """Steps by torch's schedules, on sequences padded to one length."""

    def __init__(self, schedule: str, rank: int, tokens: Sequence[Sequence[np.ndarray]], length: int) -> None:
        _, kind, stages_a_rank = SCHEDULES[schedule]
        num_stages = 2 * stages_a_rank
        like = {1: "1f1b", 2: "zb_v" if schedule == "zb_v" else "interleaved_1f1b"}[stages_a_rank]
        stages_here, copies = Place.of(plan_of(like), rank).stages, schedule in IN_HALVES
        self._parts = {n: Part(stage.layers[BACKBONE], length, copies=copies) for n, stage in stages_here.items()}
        stages = [PipelineStage(part, n, num_stages, torch.device("cpu")) for n, part in self._parts.items()]
        self._has_first, self._last = 0 in self._parts, self._parts.get(num_stages - 1)
        self._num_targets = 1.0
        # torch takes a schedule without a loss function for forward passes alone, on every rank.
        self._schedule = kind(
            stages if stages_a_rank > 1 else stages[0], NUM_MICROBATCHES, self._loss, scale_grads=False
        )
        self._batches = [
            torch.stack([torch.from_numpy(np.pad(each, (0, length - len(each)), constant_values=-1)) for each in batch])
            for batch in tokens
        ]

    def _loss(self, hidden: Tensor, tokens: Tensor) -> Tensor:
        """The part of a microbatch in the step's mean."""
        assert self._last is not None
        return self._last.loss(hidden, tokens) / self._num_targets

    def run(self, number: int) -> float:
        """The mean loss where the last stage is, else 0."""
        for part in self._parts.values():
            part.zero_grad(set_to_none=True)
        tokens = self._batches[number]
        self._num_targets = float((tokens[:, 1:] >= 0).sum())
        losses: list[Tensor] = []
        given = (tokens,) if self._has_first else ()
        wanted = {"target": tokens, "losses": losses} if self._last is not None else {}
        self._schedule.step(*given, **wanted, return_outputs=False)
        return float(sum(loss.detach() for loss in losses))

    def square_norm(self) -> float:
        """That of the gradients of all ranks. A collective."""
        own = [parameter.grad for part in self._parts.values() for parameter in part.parameters()]
        total = torch.tensor(sum(float(each.square().sum()) for each in own if each is not None))
        dist.all_reduce(total)
        return total.item()
