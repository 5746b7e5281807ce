"""Experts that ranks of data parallelism share: real steps on two ranks beside those in which FSDP gathers them.

    python benchmarks/shared_experts.py [--steps 5] [--seed 0] [--json FILE]

A mixture of 16 experts, of which 2 compute a token, on two ranks, each with sequences of its own; all else is sharded
by FSDP in both ways. With `ep` 2 each rank has half of the experts, and rows go to the ranks of theirs. Both ways take
the same examples, and take turns step by step, so that what else the machine does meets both. Rows: the step with
gathered experts over that with shared ones, medians over steps, as it is simulated, and how far the two are from each
other (goal: 10 %).
"""

from __future__ import annotations

import statistics
import tempfile
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from in_turns import predicted_step_s, steps_in_turns
from rows import Row, finish, options, show
from transformers import MixtralConfig, MixtralForCausalLM

import motet
from motet.core.example import TokenSequence
from motet.core.plan import Plan, Unit
from motet.core.workload import BACKBONE
from motet.dispatch import ItemExchange, LoadedExample
from motet.dispatch.config import BalanceConfig
from motet.models.mllm import MLLM
from motet.runtime.fsdp import FSDPConfig, shard
from motet.runtime.mesh import build_mesh
from motet.runtime.step import TrainStep
from motet.train.balancing import build_orchestrator
from motet.train.input.loading import exchanged
from motet.train.planned_job import divide_whole

NUM_RANKS, FIRST, VOCABULARY, LAYERS = 2, 1, 512, 4
"""FIRST steps are not counted."""
TOKENS = {"8 sequences of 128 tokens": (8, 128), "8 of 1,024": (8, 1024)}
OFF = 0.1
CPU = torch.device("cpu")


def build() -> MLLM:
    torch.manual_seed(0)
    llm = MixtralForCausalLM(
        MixtralConfig(
            vocab_size=VOCABULARY, hidden_size=256, intermediate_size=512, num_hidden_layers=LAYERS,
            num_attention_heads=4, num_key_value_heads=4, num_local_experts=16, num_experts_per_tok=2,
        )
    )  # fmt: skip
    return motet.compose(llm, {}).train()


def examples(seed: int, step: int, count: int, num_tokens: int) -> list[LoadedExample]:
    """Sequences of random tokens, of which the second half is learned."""
    rng = np.random.default_rng((seed, step))
    is_answer = np.arange(num_tokens) >= num_tokens // 2
    tokens = (rng.integers(0, VOCABULARY, num_tokens) for _ in range(count))
    return [LoadedExample(TokenSequence(each, is_answer, (), np.zeros(0, dtype=np.int64)), ()) for each in tokens]


class Way:
    """Steps of the model on ranks of which `ep` share experts."""

    def __init__(self, ep: int) -> None:
        model, mesh = build(), build_mesh(CPU, expert_size=ep)
        shard(model, mesh, FSDPConfig(), *divide_whole(model, mesh))
        orchestrator = build_orchestrator(BalanceConfig(), model, mesh.num_ranks, CPU, torch.float32)
        self._rank, self._exchange = mesh.rank, ItemExchange(mesh.host_group, orchestrator, model.measured)
        self._step = TrainStep(model, mesh, torch.optim.SGD(model.parameters(), lr=1e-3))

    def step(self, batch: list[LoadedExample]) -> None:
        """A step on this rank's share of a batch."""
        share = len(batch) // NUM_RANKS
        own = batch[share * self._rank : share * (self._rank + 1)]
        self._step.run([exchanged(self._exchange, own, NUM_RANKS).batch])


def plan_with(ep: int, batch: list[LoadedExample]) -> Plan:
    """The Plan of such steps."""
    any_plan = motet.apply(build(), {}, partial(torch.optim.SGD, lr=1e-3), batch=batch).plan
    unit, changes = Unit("all", ({BACKBONE: LAYERS},), dp=NUM_RANKS, ep=ep, zero=3), {"fills": (), "filling": "static"}
    size = len(batch) // NUM_RANKS
    return replace(
        any_plan, units=(unit,), schedule="data_parallel", batch_size=len(batch), microbatch_size=size, order="given",
        **changes,
    )  # fmt: skip


def run_rank(rank: int, folder: str, seed: int, num_steps: int) -> None:
    """Measure all batches on one rank; rank 0 stores (measured, simulated) ratios."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/met", rank=rank, world_size=NUM_RANKS)
    found = {
        name: ratios([examples(seed, step, *size) for step in range(FIRST + num_steps)])
        for name, size in TOKENS.items()
    }
    if rank == 0:
        torch.save(found, Path(folder) / "found")
    dist.destroy_process_group()


def ratios(batches: list[list[LoadedExample]]) -> tuple[float, float]:
    """The step with gathered experts over that with shared ones: (measured, simulated)."""
    taken = steps_in_turns([Way(ep) for ep in (1, NUM_RANKS)], batches)
    gathered_s, shared_s = (statistics.median(seconds[FIRST:]) for seconds in taken)
    plans = [plan_with(ep, batches[-1]) for ep in (1, NUM_RANKS)]
    expected = [predicted_step_s(plan, batches[-1], build()) for plan in plans]
    return gathered_s / shared_s, expected[0] / expected[1]


def rows(seed: int, num_steps: int) -> Iterator[Row]:
    """Of each batch the measured gain, the simulated one, and how far they are from each other."""
    with tempfile.TemporaryDirectory() as folder:
        mp.spawn(run_rank, (folder, seed, num_steps), NUM_RANKS)
        found: dict[str, tuple[float, float]] = torch.load(Path(folder) / "found", weights_only=False)
    for name, (gain, expected) in found.items():
        yield Row(f"{name}: gathered over shared, measured", gain)
        yield Row(f"{name}: gathered over shared, simulated", expected)
        yield Row(f"{name}: error of the simulated ratio", abs(expected / gain - 1), OFF)


def main() -> None:
    parser = options(__doc__)
    parser.add_argument("--steps", type=int, default=5)
    asked = parser.parse_args()
    measured = []
    for row in rows(asked.seed, asked.steps):
        show(row)
        measured.append(row)
    finish(measured, asked.json, seed=asked.seed, steps=asked.steps)


if __name__ == "__main__":
    main()
