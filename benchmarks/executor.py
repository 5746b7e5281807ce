"""Step time of this tree against another checkout of it: what the executor costs, on 2 gloo ranks.

    python benchmarks/executor.py --against PATH [--pairs 16] [--seed 0] [--json FILE]

PATH is a checkout with an interpreter of its own, PATH/.venv/bin/python, which imports that checkout. Ranks of both
trees live side by side and run the same steps of the same small model (Qwen2-VL and Whisper encoders, a Qwen2 backbone,
FSDP2, AdamW, clipping). A pair is a number of rounds in fresh processes; in a round each tree runs one step on one
batch, and who is first changes from round to round, so that a machine with other work to do slows both alike. Which
tree's processes start first changes from pair to pair: those that start first were seen to stay slower by some percent.
The figure of a pair is the median of its rounds' ratios, this tree's time over the other's; the result is the median
over pairs. The interval holds the true median with a probability of 95 % or more, whatever the distribution: it lies
between two of the sorted ratios.
Losses must agree, or the two trees do not run the same steps.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from pathlib import Path

from rows import OF_ROWS, Row, commit_of, finish, options, show

NUM_RANKS = 2
MOST = 1.02
"""Of the other tree's step time."""
WARM_UP = 6
"""Rounds that are not counted."""
NUM_BATCHES, EXAMPLES_A_RANK, SHRINK = 6, 4, 32
NUM_LAYERS = 2
"""Of each module: the smaller the step, the more an executor's own time would show."""
SAME = 1e-9
"""Relative difference of losses that come of the same steps: both trees add up the same numbers in float32."""


class Ranks:
    """The processes of one side, which run steps when they are told to.

    command: of rank r, which answers with a line of JSON when it is ready, and with one for each number that it reads.
    about:   the first answer of rank 0.
    """

    def __init__(self, command: Callable[[int], Sequence[str]]) -> None:
        environment = os.environ | {"OMP_NUM_THREADS": "1"}
        self._ranks = [
            subprocess.Popen(command(rank), stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment)
            for rank in range(NUM_RANKS)
        ]
        self.about, *_ = [self._answer(rank) for rank in range(NUM_RANKS)]

    def run(self, number: int) -> dict[str, float]:
        """Seconds of a step on the slowest rank, by the clock and of the processor, and the mean of the losses."""
        for rank in self._ranks:
            assert rank.stdin is not None
            print(number, file=rank.stdin, flush=True)
        answers = [self._answer(rank) for rank in range(NUM_RANKS)]
        taken = {name: max(answer[name] for answer in answers) for name in answers[0]}
        return taken | {"loss": statistics.mean(answer["loss"] for answer in answers)}

    def _answer(self, rank: int) -> dict:
        stdout = self._ranks[rank].stdout
        assert stdout is not None
        if not (line := stdout.readline()):
            raise SystemExit(f"rank {rank} has ended with {self._ranks[rank].wait()}")
        return json.loads(line)

    def close(self) -> None:
        for rank in self._ranks:
            assert rank.stdin is not None
            rank.stdin.close()
        for rank in self._ranks:
            rank.wait()


def work(rank: int, meeting: str, seed: int) -> None:
    """What a rank does, in either tree: a step for each number that comes in. The names that it uses are in both."""
    import numpy as np
    import torch
    import torch.distributed as dist
    from step_time import MEL_BINS, MODEL, PATCH_DIM, VOCABULARY, Batch, sample_table

    import motet
    from motet.dispatch import BalanceConfig, assemble
    from motet.models.build import build_mllm
    from motet.runtime.fsdp import FSDPConfig, shard
    from motet.runtime.mesh import build_mesh
    from motet.runtime.step import TrainStep
    from motet.train.balancing import build_orchestrator

    torch.set_num_threads(1)
    torch.manual_seed(seed)
    dist.init_process_group("gloo", rank=rank, world_size=NUM_RANKS, init_method=f"file://{meeting}/rendezvous")
    mesh, rng = build_mesh(torch.device("cpu")), np.random.default_rng(seed)
    config = MODEL.model_copy(deep=True)
    config.backbone.config["num_hidden_layers"] = NUM_LAYERS
    config.encoders["image"].config["depth"] = config.encoders["audio"].config["encoder_layers"] = NUM_LAYERS
    model, table = build_mllm(config, VOCABULARY), sample_table(rng)
    pools = {
        "image": rng.standard_normal((1 << 16, PATCH_DIM), np.float32),
        "audio": rng.standard_normal((1 << 14, MEL_BINS), np.float32),
    }
    orchestrator = build_orchestrator(
        BalanceConfig(method="per_phase"), model, mesh.num_ranks, mesh.device, torch.float32
    )
    batches = []
    for _ in range(NUM_BATCHES):
        kinds = rng.integers(0, len(table), EXAMPLES_A_RANK * mesh.num_ranks)
        drawn = Batch([table[k][rng.integers(len(table[k]))] for k in kinds], model, mesh.num_ranks, SHRINK, pools)
        decision = orchestrator.decide(drawn.lengths)
        sequences = [drawn.sequence(i) for i in decision.backbone.on_rank(rank)]
        media = {name: [drawn.media(name, i) for i in decision.assignments[name].on_rank(rank)] for name in drawn.items}
        batches.append(assemble(decision, drawn.lengths, rank, sequences, media))
    shard(model, mesh, FSDPConfig())
    step = TrainStep(model, mesh, torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True), max_grad_norm=1.0)
    print(json.dumps({"motet": motet.__file__}), flush=True)
    for line in sys.stdin:
        number = int(line)
        dist.barrier(mesh.group)
        start_s, processor_s = time.perf_counter(), time.process_time()
        loss = step.run([batches[number % NUM_BATCHES]], number).loss
        taken = {"step_s": time.perf_counter() - start_s, "processor_s": time.process_time() - processor_s}
        print(json.dumps(taken | {"loss": loss}), flush=True)
    dist.destroy_process_group()


def interval(ratios: Sequence[float], confidence: float = 0.95) -> tuple[float, float]:
    """The narrowest pair of sorted ratios, as far from either end, that holds the median so surely (sign test)."""
    ordered, size = sorted(ratios), len(ratios)
    outside, cut = 2 * 0.5**size, 0
    while outside + 2 * math.comb(size, cut + 1) * 0.5**size <= 1 - confidence:
        cut += 1
        outside += 2 * math.comb(size, cut) * 0.5**size
    return ordered[cut], ordered[size - 1 - cut]


def compare(pairs: Sequence[Sequence[tuple[dict[str, float], dict[str, float]]]]) -> list[Row]:
    """Figures of pairs, each of the rounds of both trees."""
    rounds = [both for pair in pairs for both in pair]
    rows = []
    for name, words in (("step_s", "step time"), ("processor_s", "processor time of a step")):
        ratios = [statistics.median(ours[name] / theirs[name] for ours, theirs in pair) for pair in pairs]
        low, high = interval(ratios)
        rows += [
            Row(f"{words}, of the other tree's", statistics.median(ratios), MOST if name == "step_s" else None),
            Row(f"{words}, of the other tree's: 95 % interval, low", low),
            Row(f"{words}, of the other tree's: 95 % interval, high", high),
            Row(f"{words}, seconds", statistics.median(ours[name] for ours, _ in rounds)),
            Row(f"{words} of the other tree, seconds", statistics.median(theirs[name] for _, theirs in rounds)),
        ]
    return [*rows, Row("pairs", len(pairs)), Row("rounds of a pair", len(pairs[0]))]


def run_pair(
    python: Path, other: Path, is_second: bool, seed: int, num_rounds: int
) -> list[tuple[dict[str, float], dict[str, float]]]:
    """The rounds of one pair, in fresh processes; is_second: whether this tree's start after the other's."""
    with ExitStack() as stack:
        trees = {}
        for name in (other, python) if is_second else (python, other):
            folder = stack.enter_context(tempfile.TemporaryDirectory())
            command = [str(name), __file__, "--meeting", folder, "--seed", str(seed)]
            trees[name] = Ranks(lambda rank, command=command: [*command, "--rank", str(rank)])
            stack.callback(trees[name].close)
        if (where := trees[python].about["motet"]) == trees[other].about["motet"]:
            raise SystemExit(f"both interpreters import {where}: nothing is compared.")
        return [run_both(trees[python], trees[other], number) for number in range(WARM_UP + num_rounds)][WARM_UP:]


def run_both(here: Ranks, there: Ranks, number: int) -> tuple[dict[str, float], dict[str, float]]:
    """One step of each tree on one batch; who is first changes from round to round."""
    if (number + number // NUM_BATCHES) % 2:  # Each batch has each tree first in turn.
        theirs, ours = there.run(number), here.run(number)
    else:
        ours, theirs = here.run(number), there.run(number)
    if abs(ours["loss"] - theirs["loss"]) > SAME * abs(theirs["loss"]):
        raise SystemExit(f"losses differ, {ours['loss']} and {theirs['loss']}: the trees do not run the same steps")
    return ours, theirs


def main() -> None:
    parser = options(__doc__, OF_ROWS, reads_lengths=False)
    parser.add_argument("--against", type=Path, help="the other checkout, with its own .venv/bin/python")
    parser.add_argument(
        "--pairs", type=int, default=16, help="an even number, so that each tree starts first equally often"
    )
    parser.add_argument("--rounds", type=int, default=2 * NUM_BATCHES, help="steps of a pair")
    parser.add_argument("--rank", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--meeting", help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.rank is not None:
        work(given.rank, given.meeting, given.seed)
        return
    if given.against is None or given.pairs < 6:
        parser.error("--against PATH is needed, and 6 pairs or more: fewer have no interval of 95 %.")
    if given.rounds < NUM_BATCHES or given.rounds % NUM_BATCHES:
        parser.error(f"--rounds is {given.rounds}; it must be a multiple of the {NUM_BATCHES} batches.")
    python, other = Path(sys.executable), given.against / ".venv" / "bin" / "python"
    pairs = []
    for number in range(given.pairs):
        pairs.append(run_pair(python, other, number % 2 == 1, given.seed, given.rounds))
        print(f"pair {number + 1} of {given.pairs}: load {os.getloadavg()[0]:.1f}", flush=True)
    rows = [row for row in compare(pairs) if given.only in row.name]
    for row in rows:
        show(row)
    finish(rows, given.json, against=commit_of(given.against), seed=given.seed)


if __name__ == "__main__":
    main()
