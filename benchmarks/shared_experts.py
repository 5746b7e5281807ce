"""Experts that ranks of data parallelism share: real steps on two ranks beside those in which FSDP gathers them.

    python benchmarks/shared_experts.py [--steps 5] [--seed 0] [--json FILE]

A mixture of 16 experts, of which 2 compute a token, on two ranks, each with sequences of its own; all else is sharded
by FSDP in both ways. With `ep` 2 each rank has half of the experts, and rows go to the ranks of theirs. Both ways take
the same examples, and take turns step by step, so that what else the machine does meets both. Rows: the step with
gathered experts over that with shared ones, medians over steps, as it is simulated, and how far the two are from each
other (goal: 10 %).
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import numpy as np
import torch
from in_turns import compare_ways, medians_in_turns, predicted_step_s
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

NUM_RANKS, VOCABULARY, LAYERS = 2, 512, 4
TOKENS = {"8 sequences of 128 tokens": (8, 128), "8 of 1,024": (8, 1024)}
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
        self._step.run([exchanged(self._exchange, own).batch])


def plan_with(ep: int, batch: list[LoadedExample]) -> Plan:
    """The Plan of such steps."""
    any_plan = motet.apply(build(), {}, partial(torch.optim.SGD, lr=1e-3), batch=batch).plan
    unit, changes = Unit("all", ({BACKBONE: LAYERS},), dp=NUM_RANKS, ep=ep, zero=3), {"fills": (), "filling": "static"}
    size = len(batch) // NUM_RANKS
    return replace(
        any_plan, units=(unit,), schedule="data_parallel", batch_size=len(batch), microbatch_size=size, order="given",
        **changes,
    )  # fmt: skip


def ratios(size: tuple[int, int], seed: int, num_steps: int) -> tuple[float, float]:
    """The step with gathered experts over that with shared ones: (measured, simulated)."""
    batches = [examples(seed, step, *size) for step in range(num_steps)]
    gathered_s, shared_s = medians_in_turns([Way(ep) for ep in (1, NUM_RANKS)], batches)
    plans = [plan_with(ep, batches[-1]) for ep in (1, NUM_RANKS)]
    expected = [predicted_step_s(plan, batches[-1], build()) for plan in plans]
    return gathered_s / shared_s, expected[0] / expected[1]


if __name__ == "__main__":
    compare_ways(__doc__, "gathered over shared", NUM_RANKS, TOKENS, ratios)
