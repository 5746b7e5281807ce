"""How many actions of a Program are simulated in a second, on one core.

    python benchmarks/simulate.py [--repeats 20] [--seed N] [--json FILE] [--only 1F1B]

Lowering turns a Program into arrays, the engine runs them, and simulate() is both and the Timeline. Times are the
processor's, the best of the repeats, as what else the machine does can only slow one down. Making the Program is not
part of it.
"""

from __future__ import annotations

import platform
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace

import numpy as np
from balance import device
from rich.console import Console
from rich.table import Table
from rows import Row, finish, options

from motet.schedule import (
    add_communication,
    add_exchanges,
    add_fsdp,
    data_parallel,
    interleaved_1f1b,
    one_f_one_b,
    split_parts,
)
from motet.schedule.program import Program
from motet.simulate import StageTimes, simulate, stage_times
from motet.simulate.engine.action_index import ActionIndex
from motet.simulate.engine.action_seconds import action_seconds
from motet.simulate.engine.backend import engine
from motet.simulate.engine.lower import waits
from motet.simulate.engine.streams import STREAMS
from motet.simulate.engine.table import action_table


@dataclass(frozen=True)
class Speeds:
    """Seconds that a Program takes in each part of a simulation."""

    program: str
    num_ranks: int
    num_actions: int
    lowering_s: float
    engine_s: float
    simulate_s: float
    reference_s: float | None


def sharded(num_ranks: int) -> Program:
    """OrchMLLM's largest job: an MLLM with two encoders on 2,560 GPUs, FSDP by groups of layers."""
    modules = [("image", 4), ("audio", 4), ("backbone", 16)]
    program = add_exchanges(data_parallel({name: True for name, _ in modules}, num_ranks, 1))
    for stage, (_, num_units) in enumerate(modules):
        program = split_parts(program, stage, num_units, num_units)
    return add_fsdp(program, {stage: (True,) * num_units for stage, (_, num_units) in enumerate(modules)})


def programs() -> dict[str, Program]:
    return {
        "1F1B, 64 stages, 4,096 microbatches": one_f_one_b(64, 4096),
        "1F1B, 64 stages, 1,024 microbatches, sends": add_communication(one_f_one_b(64, 1024)),
        "interleaved 1F1B, 8 ranks x 12 chunks, 16 microbatches": interleaved_1f1b(8, 12, 16),
        "the same, sends": add_communication(interleaved_1f1b(8, 12, 16)),
        "colocated data parallel, 2,560 ranks": sharded(2560),
    }


def times_of(program: Program, seed: int) -> StageTimes:
    """Seconds that differ from stage to stage and from microbatch to microbatch."""
    rng = np.random.default_rng(seed)
    shape = (program.num_stages, program.num_microbatches)
    forward_s = rng.uniform(0.9, 1.1, shape)
    small = np.array([0.1])
    times = stage_times(forward_s, 2 * forward_s, send_s=0.05)
    return replace(times, exchange_s=small.reshape(1, 1), gather_s=small, reduce_s=small, norm_s=small, step_s=small)


def best_s(work: Callable[[], object], repeats: int) -> float:
    seconds = []
    for _ in range(repeats):
        start = time.process_time()
        work()
        seconds.append(time.process_time() - start)
    return min(seconds)


def measure(name: str, program: Program, repeats: int, seed: int) -> Speeds:
    times = times_of(program, seed)
    if not any(action.kind.startswith("SEND") for actions in program.actions for action in actions):
        times = replace(times, send_s=np.zeros((1, 1)), return_s=np.zeros((1, 1)))
    native = engine("native")
    if native is None:
        raise SystemExit("The native engine is not built.")

    def lower():
        table = action_table(program)
        lookup = ActionIndex(table)
        seconds = action_seconds(lookup, times)
        needs = waits(lookup, seconds.stream, overlap=True)
        stream = table.rank * len(STREAMS) + seconds.stream
        total_s = (seconds.held_s + seconds.tensor_s)[:, 0]
        return stream, lookup.operation, total_s, needs.dependent, needs.dependency

    lowered = lower()
    is_small = program.num_actions < 20_000
    return Speeds(
        name,
        program.num_ranks,
        program.num_actions,
        best_s(lower, repeats),
        best_s(lambda: native.run(*lowered), repeats),
        best_s(lambda: simulate(program, times).makespan_s, repeats),
        best_s(lambda: simulate(program, times, backend="reference"), 3) if is_small else None,
    )


def table_of(rows: list[Speeds]) -> Table:
    table = Table("program", title="million actions a second")
    for heading in ("actions", "lowering", "engine", "simulate()", "reference", "ms"):
        table.add_column(heading, justify="right")
    for row in rows:
        seconds = (row.lowering_s, row.engine_s, row.simulate_s, row.reference_s)
        speeds = (f"{row.num_actions / took / 1e6:.2f}" if took else "" for took in seconds)
        table.add_row(row.program, f"{row.num_actions:,}", *speeds, f"{1e3 * row.simulate_s:.1f}")
    return table


def main() -> None:
    parser = options(__doc__, "a part of a Program's name", reads_lengths=False)
    parser.add_argument("--repeats", type=int, default=20, help="of which the best counts")
    asked = parser.parse_args()
    chosen = {name: program for name, program in programs().items() if asked.only in name}
    measured = [measure(name, program, asked.repeats, asked.seed) for name, program in chosen.items()]
    console = Console(width=150)
    console.print(table_of(measured))
    console.print(device())
    rows = [Row(f"{each.program}: ms of simulate()", 1e3 * each.simulate_s) for each in measured]
    about = {"device": device(), "python": platform.python_version(), "repeats": asked.repeats, "seed": asked.seed}
    finish(rows, asked.json, **about, programs=[asdict(each) for each in measured])


if __name__ == "__main__":
    main()
