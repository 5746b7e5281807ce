"""Loss and gradients of every parameter equal the one-process reference: float64 to 1e-10, whatever moves where."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import pytest
import torch
import torch.distributed as dist

from motet.core.workload import home_ranks
from motet.dispatch import BalanceConfig, ItemExchange, LoadedExample, Orchestrator, RankBatch, assemble
from motet.dispatch.manifest import Manifest, describe
from motet.runtime.fsdp import FSDPConfig, shard
from motet.runtime.mesh import Mesh, build_mesh
from motet.runtime.step import StepResult, TrainStep
from parity.tiny import PHASES, build_model, draw_examples, reference_step
from ranks import run_ranks

TOLERANCE = 1e-10


@dataclass(frozen=True)
class Case:
    """One way to run the same step."""

    phases: str | tuple[str, ...] = "all"
    mode: str = "index"
    num_microbatches: int = 1
    frozen: tuple[str, ...] = ()
    fsdp: FSDPConfig = field(default_factory=FSDPConfig)
    num_examples: int = 13
    seed: int = 0
    contents: tuple[str, ...] = PHASES


def orchestrator_of(model, phases, num_ranks: int) -> Orchestrator:
    config = BalanceConfig(phases=phases)
    costs = config.phase_costs({phase: model.encoders[phase].cost for phase in model.encoders})
    return Orchestrator(costs, num_ranks, config.balanced(model.encoders))


def rank_batch(model, examples: list[LoadedExample], mesh: Mesh, case: Case) -> RankBatch:
    """This rank's part of a microbatch, by either way."""
    orchestrator = orchestrator_of(model, case.phases, mesh.num_ranks)
    home = home_ranks(len(examples), mesh.num_ranks)
    if case.mode == "exchange":
        exchange = ItemExchange(mesh.host_group, orchestrator, dict(model.encoders.items()), capacity=16)
        got = exchange([example for example, rank in zip(examples, home) if rank == mesh.rank])
        assert got.kept.all()
        return assemble(got.decision, got.lengths, mesh.rank, got.sequences, got.media, ranks_per_node=2)
    words = [
        describe([e for e, rank in zip(examples, home) if rank == r], PHASES, model.encoders)
        for r in range(mesh.num_ranks)
    ]
    lengths = Manifest.read(words, PHASES).lengths
    decision = orchestrator.decide(lengths)
    items = {p: [m for e in examples for q, m in zip(e.sequence.media, e.media) if q == p] for p in PHASES}
    return assemble(
        decision,
        lengths,
        mesh.rank,
        [examples[i].sequence for i in decision.backbone.on_rank(mesh.rank)],
        {p: [items[p][i] for i in decision.assignments[p].on_rank(mesh.rank)] for p in PHASES},
        ranks_per_node=2,
    )


def run_case(rank: int, case: Case, dtype=torch.float64) -> tuple[StepResult, dict[str, torch.Tensor | None], Mesh]:
    """The step as a user runs it; gradients whole again, on every rank."""
    mesh = build_mesh(torch.device("cpu"), shard_size=case.fsdp.shard_size)
    model = build_model(dtype, case.frozen)
    shard(model, mesh, case.fsdp)
    examples = draw_examples(case.num_examples, case.seed, case.contents)
    parts = [[examples[i] for i in part] for part in np.array_split(np.arange(len(examples)), case.num_microbatches)]
    batches = [rank_batch(model, part, mesh, case).to("cpu", dtype=dtype) for part in parts]
    result = TrainStep(model, mesh).run(batches)
    gradients = {
        name: None if p.grad is None else getattr(p.grad, "full_tensor", lambda p=p: p.grad)()
        for name, p in model.named_parameters()
    }
    return result, gradients, mesh


def check_case(rank: int, case: Case) -> list[str]:
    """What differs from the reference, on rank 0."""
    result, gradients, _ = run_case(rank, case)
    loss, grad_norm = result.loss, result.grad_norm
    if rank:
        return []
    model = build_model(torch.float64, case.frozen)
    expected_loss = reference_step(model, draw_examples(case.num_examples, case.seed, case.contents))
    expected = {name: p.grad for name, p in model.named_parameters()}
    wrong = []
    if abs(loss - expected_loss) > TOLERANCE * abs(expected_loss):
        wrong.append(f"loss {loss} instead of {expected_loss}")
    norm = sum(float(g.square().sum()) for g in expected.values() if g is not None) ** 0.5
    if abs(grad_norm - norm) > TOLERANCE * norm:
        wrong.append(f"gradient norm {grad_norm} instead of {norm}")
    for name, gradient in expected.items():
        if (gradient is None) != (gradients[name] is None):
            wrong.append(f"{name}: gradient is {gradients[name]} instead of {gradient}")
        elif gradient is not None and (gradients[name] - gradient).abs().max() > TOLERANCE * gradient.abs().max():
            wrong.append(f"{name}: off by {(gradients[name] - gradient).abs().max():.1e} of {gradient.abs().max():.1e}")
    return [f"{case}: {line}" for line in wrong]


def check_cases(rank: int, num_ranks: int, cases: list[Case]) -> list[str]:
    wrong = []
    for case in cases:
        wrong += check_case(rank, case)
        dist.barrier()
    return wrong


def every_balance(**options) -> list[Case]:
    return [
        Case(phases=p, mode=m, **options) for p in ("off", "backbone", "all", ("image",)) for m in ("index", "exchange")
    ]


HYBRID = FSDPConfig(shard_size=2)
VARIANTS = [
    Case(num_microbatches=3),
    Case(fsdp=FSDPConfig(recompute=True)),
    Case(fsdp=FSDPConfig(recompute=True, reshard_after_forward=False), num_microbatches=3),
    Case(frozen=("image encoder",)),
    Case(frozen=("image",)),
    Case(frozen=("image", "audio")),
    Case(frozen=("backbone",)),
    Case(frozen=("backbone", "image encoder", "audio"), num_microbatches=3),
    Case(num_examples=3),
    Case(num_examples=1),
    Case(contents=()),
]


@pytest.mark.parametrize("num_ranks", [1, 2, 3, 4])
def test_gradients_equal_the_reference(num_ranks):
    cases = every_balance() + VARIANTS
    if num_ranks == 4:
        cases += every_balance(fsdp=HYBRID, num_microbatches=3)
    if num_ranks % 2 == 0:
        cases += [Case(fsdp=FSDPConfig(shard_size=1), num_microbatches=3)]
    wrong = run_ranks(check_cases, num_ranks, cases)[0]
    assert not wrong, "\n".join(wrong)
