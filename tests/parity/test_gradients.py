"""Loss and gradients of every parameter equal the one-process reference: float64 to 1e-10, whatever moves where.

Each case runs on one or two numbers of ranks. Steps without stages of other examples, frozen, sharded and recomputed
in any way, are one in ten of the cases of benchmarks/fuzz_plans.py (`parity.cut_steps.drawn_cut`).
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import cache
from unittest import mock

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

from motet.assign.whole_step import decide_step
from motet.balance import suggest_phase_caps
from motet.core.workload import BACKBONE, BatchLengths, home_ranks, total_lengths
from motet.data.groups import GroupedOrder
from motet.dispatch import (
    BalanceConfig,
    Decision,
    ItemExchange,
    LoadedExample,
    Orchestrator,
    RankBatch,
    SpeedConfig,
    assemble,
    exchange_rows,
)
from motet.dispatch.loaded import LoadedTables, tables_of
from motet.models.spec import model_spec
from motet.runtime.fsdp import FSDPConfig, shard
from motet.runtime.mesh import Mesh, build_mesh
from motet.runtime.step import StepResult, TrainStep
from motet.train.balancing import build_orchestrator
from parity.collectives import counted_collectives, on_all_ranks
from parity.tiny import PHASES, build_model, draw_examples, reference_step
from ranks import run_ranks
from tiers import in_tiers

TOLERANCE = 1e-10
CPU = torch.device("cpu")
EXCHANGE = sys.modules[exchange_rows.__module__]
RANKS_PER_NODE = 2
NEAR = SpeedConfig(link_gbytes_per_s=1e9, link_latency_us=0.0, inter_node_gbytes_per_s=1e9, inter_node_latency_us=0.0)


@dataclass(frozen=True)
class Case:
    """One way to run the same step.

    near: the link takes no time, so that "auto" moves what it can. owned: ranks have loaded examples of their own, of
    which rank 0 has none and the last most, as with splits of different sizes. recomputes: each rank recomputes other
    numbers of blocks in each microbatch. readers: how two encoders that read each image are combined; "" if one does
    (`tiny.build_model`).
    """

    phases: str | tuple[str, ...] = "all"
    method: str = "per_phase"
    near: bool = False
    cost: str = "flops"
    costs: dict = field(default_factory=dict)
    policy: str | dict = "auto"
    mode: str = "index"
    num_microbatches: int = 1
    defer: str = "off"
    communicator: str = "all_to_all"
    node_wise: bool = True
    owned: bool = False
    groups: bool = False
    frozen: tuple[str, ...] = ()
    fsdp: FSDPConfig = field(default_factory=FSDPConfig)
    num_examples: int = 13
    seed: int = 0
    contents: tuple[str, ...] = PHASES
    readers: str = ""
    recomputes: bool = False
    family: str = "qwen2"


def orchestrator_of(model, num_ranks: int, case: Case) -> Orchestrator:
    speed = {"speed": NEAR} if case.near and "auto" in (case.method, case.defer) else {}
    config = BalanceConfig(
        phases=case.phases,
        method="auto" if case.phases in ("off", "backbone") else case.method,  # None is chosen there.
        mode=case.mode,
        cost=case.cost,
        costs=case.costs,
        policy=case.policy,
        defer=case.defer,
        communicator=case.communicator,
        node_wise=case.node_wise,
        **speed,
    )
    config.balanced(model.encoders)
    recompute = case.fsdp.recomputed(model_spec(model).num_blocks)
    device = torch.device("cpu")
    nodes = (1, num_ranks - 1) if case.seed % 2 and num_ranks > 2 else RANKS_PER_NODE
    return build_orchestrator(
        config, model, num_ranks, device, torch.float64, recompute=recompute, ranks_per_node=nodes
    )


def rank_batch(
    model, examples: list[LoadedExample], mesh: Mesh, case: Case, orchestrator: Orchestrator | None = None
) -> RankBatch:
    """This rank's part of a microbatch, by either way."""
    orchestrator = orchestrator or orchestrator_of(model, mesh.num_ranks, case)
    home = home_ranks(len(examples), mesh.num_ranks)
    if case.owned:
        home = np.minimum(np.arange(len(examples)) % 5 + 1, mesh.num_ranks - 1)
    if case.mode == "exchange":
        exchange = ItemExchange(mesh.host_group, orchestrator, dict(model.encoders.items()), capacity=16)
        got = exchange([example for example, rank in zip(examples, home) if rank == mesh.rank])
        assert got.kept.all()
        assert (got.lengths.home == np.sort(home)).all()
        return assemble(got.decision, got.lengths, mesh.rank, got.sequences, got.media)
    lengths = lengths_of(model, examples, mesh)
    return assembled(examples, lengths, orchestrator.decide(lengths), mesh)


def lengths_of(model, examples: list[LoadedExample], mesh: Mesh) -> BatchLengths:
    """As they come, from the first rank to the last."""
    home = home_ranks(len(examples), mesh.num_ranks)
    words = [
        tables_of([e for e, rank in zip(examples, home) if rank == r], tuple(model.encoders), model.encoders)
        for r in range(mesh.num_ranks)
    ]
    return LoadedTables.read(words, tuple(model.encoders)).lengths


def deferred_batches(model, examples: list[LoadedExample], mesh: Mesh, case: Case) -> list[RankBatch]:
    """This rank's parts of the microbatches of a step that is decided as a whole."""
    count = case.num_microbatches
    home = np.tile(home_ranks(len(examples) // count, mesh.num_ranks), count)
    lengths = replace(lengths_of(model, examples, mesh), home=home)
    orchestrator = orchestrator_of(model, mesh.num_ranks, case)
    step = decide_step(orchestrator, lengths, count)
    assert step.method == "defer", (case, mesh.num_ranks, step.why)
    taken = np.concatenate([part.examples for part in step.microbatches])
    assert sorted(taken.tolist()) == list(range(len(examples)))
    if case.mode == "exchange":
        parts = [[examples[i] for i in part.examples] for part in step.microbatches]
        return [rank_batch(model, part, mesh, case, orchestrator) for part in parts]
    return [
        assembled([examples[i] for i in part.examples], part.lengths, part.decision, mesh) for part in step.microbatches
    ]


def grouped_batches(model, examples: list[LoadedExample], mesh: Mesh, case: Case) -> list[RankBatch]:
    """This rank's groups of an epoch, each a microbatch: as many as the ranks need for all of them."""
    lengths = lengths_of(model, examples, mesh)
    totals = {phase: total_lengths(lengths, phase) for phase in (*PHASES, BACKBONE)}
    epoch = GroupedOrder(totals, suggest_phase_caps(totals, batch_size=2), case.seed).epoch(0)
    group = np.repeat(np.arange(epoch.num_groups), np.diff(epoch.offsets))
    in_groups = replace(lengths.take(epoch.items), group=group)
    step = decide_step(orchestrator_of(model, mesh.num_ranks, case), in_groups, -(-epoch.num_groups // mesh.num_ranks))
    assert step.method == ""
    return [
        assembled([examples[epoch.items[i]] for i in part.examples], part.lengths, part.decision, mesh)
        for part in step.microbatches
    ]


def assembled(examples: list[LoadedExample], lengths: BatchLengths, decision: Decision, mesh: Mesh) -> RankBatch:
    phases = tuple(lengths.items)
    items = {p: [m for e in examples for q, m in zip(e.sequence.media, e.media) if q == p] for p in phases}
    return assemble(
        decision,
        lengths,
        mesh.rank,
        [examples[i].sequence for i in decision.backbone.on_rank(mesh.rank)],
        {p: [items[p][i] for i in decision.assignments[p].on_rank(mesh.rank)] for p in phases},
    )


@cache
def mesh_of(shard_size: int | None, device: torch.device = CPU) -> Mesh:
    return build_mesh(device, shard_size=shard_size)


def local(tensor: torch.Tensor) -> torch.Tensor:
    """What this rank holds of a tensor that may be sharded."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def whole(shards: dict[str, torch.Tensor | None], mesh: Mesh) -> dict[str, torch.Tensor | None]:
    """Sharded tensors put together on rank 0, in one collective, where replicas must be the same to the bit."""
    everywhere = [None] * mesh.num_ranks
    dist.gather_object(shards, everywhere if mesh.rank == 0 else None)
    if mesh.rank:
        return {}
    copies = np.arange(mesh.num_ranks).reshape(-1, mesh.shards.size(mesh.shards.ndim - 1))
    tensors = {}
    for name in shards:
        parts = [[everywhere[rank][name] for rank in ranks] for ranks in copies]
        missing = {part is None for replica in parts for part in replica}
        assert len(missing) == 1, f"{name} has a gradient on some ranks only"
        replicas = [None if True in missing else torch.cat(replica) for replica in parts]
        assert True in missing or all(torch.equal(replica, replicas[0]) for replica in replicas), f"{name}: replicas"
        tensors[name] = replicas[0]
    return tensors


@contextmanager
def counted_exchanges() -> Iterator[list[tuple[str, int]]]:
    """Communicator, and bytes that this rank gives other ranks, of each exchange; FSDP calls other collectives."""
    sent_bytes = []
    exchange = dist.all_to_all_single

    def count(received, sent, recv_splits, send_splits, group, **how):
        away = sum(rows for rank, rows in enumerate(send_splits) if rank != dist.get_rank(group))
        sent_bytes.append(("all_to_all", away * sent.element_size() * sent.shape[1:].numel()))
        return exchange(received, sent, recv_splits, send_splits, group=group, **how)

    gather = EXCHANGE.all_gathered

    def count_gathered(rows, share_rows, group):
        away = (group.size() - 1) * share_rows
        sent_bytes.append(("all_gather", away * rows.element_size() * rows.shape[1:].numel()))
        return gather(rows, share_rows, group)

    with (
        mock.patch.object(dist, "all_to_all_single", count),
        mock.patch.object(EXCHANGE, "all_gathered", count_gathered),
    ):
        yield sent_bytes


def run_case(
    case: Case, dtype: torch.dtype = torch.float64, device: torch.device = CPU
) -> tuple[StepResult, dict[str, torch.Tensor | None]]:
    """The step as a user runs it; whole gradients on rank 0."""
    mesh = mesh_of(case.fsdp.shard_size, device)
    model = build_model(dtype, case.frozen, case.readers, case.family).to(device)
    shard(model, mesh, case.fsdp)
    examples = draw_examples(case.num_examples, case.seed, case.contents, case.readers)
    parts = [[examples[i] for i in part] for part in np.array_split(np.arange(len(examples)), case.num_microbatches)]
    if case.defer == "auto":
        batches = deferred_batches(model, examples, mesh, case)
    elif case.groups:
        batches = grouped_batches(model, examples, mesh, case)
    else:
        orchestrator = orchestrator_of(model, mesh.num_ranks, case)
        batches = [rank_batch(model, part, mesh, case, orchestrator) for part in parts]
    step = TrainStep(model, mesh, once_a_step=case.fsdp.once_a_step)
    batches = [step.prepared(batch, case.fsdp.types.compute or dtype).to(device, dtype=dtype) for batch in batches]
    if case.recomputes:
        rng = np.random.default_rng((case.seed, mesh.rank))
        batches = [replace(batch, recompute=recomputed_at_random(rng)) for batch in batches]
    with counted_exchanges() as sent, counted_collectives() as collectives:
        result = step.run(batches)
    check_bytes(case, batches, sent, result.moved_bytes)
    expected = {**on_all_ranks(collectives), "exchange": result.moved_bytes}
    if case.communicator != "all_gather":  # Those of features would be counted as parameters.
        assert result.sent_bytes == pytest.approx(expected, abs=0.5), case
    shards = {name: None if p.grad is None else local(p.grad).cpu() for name, p in model.named_parameters()}
    return result, whole(shards, mesh)


def recomputed_at_random(rng: np.random.Generator) -> dict[str, int]:
    """Between none and all of the two blocks of each module."""
    return {name: int(rng.integers(0, 3)) for name in ("image", "backbone", "audio")}


def check_bytes(case: Case, batches: list[RankBatch], sent: list[tuple[str, int]], moved_bytes: int) -> None:
    """What the metrics count is what collectives were given: with joint assignment nothing, and no collective."""
    everywhere = torch.tensor(sum(num_bytes for _, num_bytes in sent))
    dist.all_reduce(everywhere)
    assert everywhere.item() == moved_bytes, case
    assert {communicator for communicator, _ in sent} <= {case.communicator}, case
    methods = {batch.decision.method for batch in batches}
    if case.groups:
        # Groups stay as they are where balancing would exceed them.
        methods.discard("off")
        assert methods <= methods_of(case), (case, methods)
        return
    assert methods <= methods_of(case), (case, methods)
    moves = dist.get_world_size() > 1 and case.phases != "backbone" and methods_of(case) - {"joint", "off"}
    assert (moved_bytes > 0) == bool(moves and case.contents), (case, methods)
    if methods == {"joint"}:
        assert not sent, f"{case}: {sent} bytes of encoder outputs crossed ranks"


def methods_of(case: Case) -> set[str]:
    """How its microbatches may be balanced; where not by "joint" alone, outputs of encoders move."""
    if case.phases != "all":
        return {"off" if case.phases == "off" else "some"}
    if case.method != "auto":
        return {case.method}
    # Modules have different heavy examples: each is better balanced by itself where moving takes no time.
    return {"per_phase", "mixed", "joint"} if case.near and dist.get_world_size() > 1 else {"joint"}


@cache
def reference(
    frozen: tuple[str, ...], num_examples: int, seed: int, contents: tuple[str, ...], readers: str, family: str
) -> tuple[float, dict[str, torch.Tensor | None]]:
    model = build_model(torch.float64, frozen, readers, family)
    loss = reference_step(model, draw_examples(num_examples, seed, contents, readers))
    return loss, {name: p.grad for name, p in model.named_parameters()}


def relative(found: torch.Tensor, expected: torch.Tensor) -> float:
    """Largest difference, in the largest value; of a tensor that is zero but for rounding, in one."""
    largest = expected.abs().max().item()
    return (found.double() - expected).abs().max().item() / (largest if largest > 1e-15 else 1.0)


def check_case(rank: int, case: Case) -> list[str]:
    """What differs from the reference, on rank 0."""
    result, gradients = run_case(case)
    loss, grad_norm = result.loss, result.grad_norm
    if rank:
        return []
    expected_loss, expected = reference(
        case.frozen, case.num_examples, case.seed, case.contents, case.readers, case.family
    )
    wrong = []
    if abs(loss - expected_loss) > TOLERANCE * abs(expected_loss):
        wrong.append(f"loss {loss} instead of {expected_loss}")
    norm = sum(float(g.square().sum()) for g in expected.values() if g is not None) ** 0.5
    if abs(grad_norm - norm) > TOLERANCE * norm:
        wrong.append(f"gradient norm {grad_norm} instead of {norm}")
    for name, gradient in expected.items():
        if (gradient is None) != (gradients[name] is None):
            wrong.append(f"{name}: gradient is {gradients[name]} instead of {gradient}")
        elif gradient is not None and (off := relative(gradients[name], gradient)) > TOLERANCE:
            wrong.append(f"{name}: off by {off:.1e}")
    return [f"{case}: {line}" for line in wrong]


def check_cases(rank: int, num_ranks: int, cases: list[Case]) -> list[str]:
    wrong = []
    for case in cases:
        wrong += check_case(rank, case)
        dist.barrier()
    return wrong


BELOW = [
    Case(frozen=("below",), num_microbatches=3),
    Case(frozen=("below", "image", "audio"), num_microbatches=3, fsdp=FSDPConfig(reshard_after_forward=False)),
    Case(frozen=("below", "image", "audio"), num_microbatches=3, fsdp=FSDPConfig(recompute=True), mode="exchange"),
    Case(frozen=("below", "image encoder", "audio"), num_examples=3, num_microbatches=3),
]
"""Blocks before which nothing learns have no backward pass, unless an encoder before them learns."""


def every_balance(**options) -> list[Case]:
    return [
        Case(phases=p, mode=m, **options) for p in ("off", "backbone", "all", ("image",)) for m in ("index", "exchange")
    ]


def every_method(**options) -> list[Case]:
    """All phases balanced in the ways that `every_balance` leaves out."""
    ways = (("joint", False), ("auto", False), ("auto", True))
    return [Case(method=way, near=near, mode=m, **options) for way, near in ways for m in ("index", "exchange")]


HYBRID = FSDPConfig(shard_size=2)
ABLATED = [
    Case(mode=("index", "exchange")[(way + other) % 2], communicator=communicator, node_wise=node_wise, **options)
    for way, (communicator, node_wise) in enumerate(
        (("all_gather", True), ("all_to_all", False), ("all_gather", False))
    )
    for other, options in enumerate(
        ({}, {"phases": ("image",)}, {"method": "auto", "near": True, "num_microbatches": 3})
    )
] + [
    Case(mode="index", communicator="all_gather", frozen=("image encoder", "audio")),
    Case(mode="index", communicator="all_gather", num_examples=1),
    Case(mode="exchange", communicator="all_gather", method="joint"),
    Case(mode="exchange", communicator="all_gather", contents=()),
    Case(mode="exchange", communicator="all_gather", owned=True, num_microbatches=3),
]
OWNED = [
    Case(mode="exchange", owned=True, num_microbatches=3, **options)
    for options in ({}, {"phases": "off"}, {"phases": "backbone"}, {"method": "joint"})
]
REPLICATED = FSDPConfig(shard_size=1)
REPLICATED_VARIANTS = [
    Case(fsdp=REPLICATED, frozen=("image encoder",), num_microbatches=3),
    Case(fsdp=REPLICATED, frozen=("backbone", "audio")),
    Case(fsdp=REPLICATED, num_examples=1),
    Case(fsdp=REPLICATED, contents=()),
    Case(fsdp=FSDPConfig(shard_size=1, recompute=True), num_microbatches=3),
    Case(fsdp=FSDPConfig(shard_size=1, recompute="auto"), recomputes=True, num_microbatches=3),
]
VARIANTS = [
    Case(cost="length"),
    Case(cost="length", method="joint", mode="exchange"),
    Case(cost="length", method="auto", near=True, num_microbatches=3),
    Case(num_microbatches=3),
    Case(num_microbatches=3, method="joint"),
    Case(frozen=("image encoder", "audio"), method="auto", near=True),
    Case(num_examples=1, method="joint"),
    Case(contents=(), method="joint"),
    Case(fsdp=FSDPConfig(recompute=True)),
    Case(fsdp=FSDPConfig(recompute={"image": 1, "backbone": 1}), num_microbatches=3),
    Case(fsdp=FSDPConfig(recompute=True, reshard_after_forward=False), num_microbatches=3),
    Case(fsdp=FSDPConfig(recompute="auto"), recomputes=True, num_microbatches=3),
    Case(fsdp=FSDPConfig(recompute="auto"), recomputes=True, num_microbatches=3, mode="exchange", seed=1),
    Case(fsdp=FSDPConfig(recompute="auto"), recomputes=True, num_microbatches=3, phases="off", seed=2),
    Case(fsdp=FSDPConfig(recompute="auto"), recomputes=True, num_microbatches=3, frozen=("image encoder", "audio")),
    Case(fsdp=FSDPConfig(recompute="auto", reshard_after_forward=False), recomputes=True, num_microbatches=3, seed=3),
    Case(frozen=("image encoder",)),
    Case(frozen=("image",)),
    Case(frozen=("image", "audio")),
    Case(frozen=("backbone",)),
    Case(frozen=("backbone", "image encoder", "audio"), num_microbatches=3),
    Case(num_examples=3),
    Case(num_examples=1),
    Case(contents=()),
]
DEFERRED = [
    Case(num_examples=12, num_microbatches=4, defer="auto", near=True),
    Case(num_examples=12, num_microbatches=4, defer="auto", near=True, method="joint"),
    Case(num_examples=12, num_microbatches=4, defer="auto", near=True, mode="exchange"),
    Case(num_examples=12, num_microbatches=6, defer="auto", near=True, mode="exchange", method="joint"),
    Case(num_examples=6, num_microbatches=6, defer="auto", near=True, mode="exchange", method="joint"),
    Case(num_examples=12, num_microbatches=3, defer="auto", near=True, method="auto", cost="length"),
    # With fewer examples than ranks and microbatches together, some microbatches have none.
    Case(num_examples=6, num_microbatches=6, defer="auto", near=True, method="joint"),
    Case(num_examples=12, num_microbatches=4, defer="auto", near=True, frozen=("image encoder",)),
    Case(num_examples=12, num_microbatches=4, defer="auto", near=True, contents=()),
    Case(num_examples=12, num_microbatches=6, defer="auto", near=True, method="joint", fsdp=FSDPConfig(recompute=True)),
]
GROUPED = [
    Case(groups=True, phases="off"),
    Case(groups=True, phases="off", num_examples=1),
    Case(groups=True, phases="off", contents=()),
    Case(groups=True, phases=("image",)),
    Case(groups=True, method="joint", seed=2),
    Case(groups=True, method="per_phase"),
    Case(groups=True, method="auto", near=True, num_examples=20, seed=1),
    Case(groups=True, method="auto", frozen=("image encoder",), fsdp=FSDPConfig(recompute=True)),
]


QUADRATIC = {phase: {"linear": 3, "quadratic": 2} for phase in ("audio", "image", "backbone")}
POLICIES = [
    *(Case(policy=policy, mode=m) for policy in ("packed", "padded") for m in ("index", "exchange")),
    Case(policy={"image": "padded", "backbone": "padded", "audio": "packed"}, method="joint"),
    Case(policy="padded", method="auto", near=True, num_microbatches=3),
    Case(policy={"audio": "padded_attention"}, cost="length", costs=QUADRATIC),
    Case(policy={"audio": "padded_attention", "image": "padded"}, cost="length", costs=QUADRATIC, mode="exchange"),
    Case(policy="packed", cost="length", costs=QUADRATIC, method="joint", num_microbatches=3),
    Case(cost="length", costs=QUADRATIC),
]


def drawn_cases(count: int) -> list[Case]:
    """Steps of other examples, divided, frozen, weighed and balanced in any way. Drawn alike on every run."""
    rng = np.random.default_rng(11)

    def one_of(*ways):
        return ways[rng.integers(len(ways))]

    cases = []
    for seed in range(1, count + 1):
        policy = {phase: one_of("auto", "packed", "padded") for phase in ("image", "audio", "backbone")}
        weighed = one_of({}, {"cost": "length"}, {"cost": "length", "costs": QUADRATIC})
        if "costs" in weighed and rng.integers(2):
            policy["audio"] = "padded_attention"
        cases.append(
            Case(
                policy=policy,
                method=one_of("joint", "per_phase"),
                mode=one_of("index", "exchange"),
                num_microbatches=int(rng.integers(1, 4)),
                frozen=one_of((), ("image encoder",), ("audio",)),
                num_examples=int(rng.integers(12, 20)),
                seed=seed,
                **weighed,
            )
        )
    return cases


def at(num_ranks: int, cases: list[Case]) -> list[Case]:
    """The half of them that runs on an odd number of ranks, or on an even one."""
    return cases[num_ranks % 2 :: 2]


def cases_on(num_ranks: int) -> list[Case]:
    every = every_balance() + every_method()
    if num_ranks == 1:
        cases = every[::4] + VARIANTS[::8] + GROUPED[::4]
    else:
        third = slice(num_ranks % 3, None, 3)  # Each of them on 2, 3 or 4 ranks.
        cases = VARIANTS[third] + GROUPED[third] + DEFERRED[third]
    if num_ranks in (2, 3):
        replicated = every_balance(fsdp=REPLICATED, num_microbatches=3) + every_method(fsdp=REPLICATED)
        # What is replicated on 2 ranks is sharded on 3, and the other way round.
        cases += at(num_ranks, every) + at(num_ranks + 1, replicated)[num_ranks % 2 :: 2]
        cases += at(num_ranks, POLICIES + drawn_cases(6) + REPLICATED_VARIANTS)
    if num_ranks in (3, 4):
        cases += at(num_ranks, ABLATED)
    if num_ranks == 4:
        hybrid = every_balance(fsdp=HYBRID, num_microbatches=3) + every_method(fsdp=HYBRID, num_microbatches=3)
        cases += OWNED + hybrid[1::3]
    return cases


EVERY = {num_ranks: cases_on(num_ranks) for num_ranks in (1, 2, 3, 4)}
FIRST = {1: range(len(EVERY[1])), 2: (4, 10, 30, 32), 3: (10, 12, 28, 35, 42), 4: (3, 13, 18, 27)}
"""Numbers of those that `make test` has: deferred, grouped, owned, replicated, hybrid, frozen and recomputed ones."""


@pytest.mark.parametrize(("num_ranks", "cases"), in_tiers(EVERY, FIRST))
def test_gradients_equal_the_reference(num_ranks, cases):
    wrong = run_ranks(check_cases, num_ranks, cases)[0]
    assert not wrong, "\n".join(wrong)


@pytest.mark.slow
def test_nothing_runs_backward_through_blocks_before_which_nothing_learns():
    """On ranks with whatever items: FSDP's collectives are the same on all of them."""
    wrong = run_ranks(check_cases, 2, BELOW)[0]
    assert not wrong, "\n".join(wrong)


ONCE = {"once_a_step": True, "reshard_after_forward": False}
ONCE_A_STEP = [
    Case(fsdp=FSDPConfig(**ONCE), num_microbatches=3),
    Case(fsdp=FSDPConfig(**ONCE), num_microbatches=3, seed=1),
    Case(fsdp=FSDPConfig(**ONCE), num_microbatches=3, frozen=("image encoder", "audio")),
    Case(fsdp=FSDPConfig(**ONCE), num_microbatches=3, frozen=("backbone",)),
    Case(fsdp=FSDPConfig(**ONCE), num_microbatches=3, num_examples=3),
    Case(fsdp=FSDPConfig(**ONCE), num_microbatches=3, contents=("audio",), method="joint"),
    Case(fsdp=FSDPConfig(**ONCE, recompute=True), num_microbatches=3, mode="exchange"),
]


@pytest.mark.parametrize(("num_ranks", "shard_size"), [(2, None), pytest.param(4, 2, marks=pytest.mark.slow)])
def test_gradients_that_are_reduced_once_a_step_equal_the_reference(num_ranks, shard_size):
    chosen = ONCE_A_STEP[num_ranks // 4 :: 2]
    cases = [replace(case, fsdp=case.fsdp.model_copy(update={"shard_size": shard_size})) for case in chosen]
    wrong = run_ranks(check_cases, num_ranks, cases)[0]
    assert not wrong, "\n".join(wrong)


RECOMPUTED = FSDPConfig(recompute=True)
TWO_READERS = [
    Case(readers=readers, **options)
    for readers in ("rows", "sum")
    for options in (
        {},
        {"mode": "exchange"},
        {"method": "joint", "num_microbatches": 3},
        {"method": "joint", "mode": "exchange", "fsdp": REPLICATED},
        {"phases": ("second",), "fsdp": RECOMPUTED},
        {"fsdp": FSDPConfig(recompute={"second": 1, "backbone": 1}), "num_microbatches": 3},
        {"fsdp": REPLICATED, "num_microbatches": 3},
        {"frozen": ("image encoder", "second")},
        {"frozen": ("backbone", "image")},
        {"contents": ("audio",)},
        {"contents": ("image",), "num_examples": 1},
        {"contents": ("image",), "num_examples": 1, "phases": "off"},
        {"contents": (), "method": "joint"},
    )
]


OF_TWO_READERS = {1: TWO_READERS[::9], 2: TWO_READERS[::2], 3: TWO_READERS[1::4]}


@pytest.mark.parametrize(("num_ranks", "cases"), in_tiers(OF_TWO_READERS, {1: range(3), 2: (1, 4, 7), 3: (0,)}))
def test_gradients_with_two_encoders_of_an_item_callbacks_and_queries(num_ranks, cases):
    wrong = run_ranks(check_cases, num_ranks, cases)[0]
    assert not wrong, "\n".join(wrong)
