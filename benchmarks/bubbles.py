"""ViT-22B in the bubbles of GPT-175B on 1,536, 2,048 and 3,072 GPUs: Optimus' Table 7 beside what Motet places.

    python benchmarks/bubbles.py [--json FILE] [--only 1536]

Times are those to which papers_optimus.py fits two constants, the efficiency and the DP bubble. Slices of encoders go
into the gaps between the backbone's passes (PP bubbles), and, in the last case, also into tensor-parallel
communication, which then is 11.2 % of the backbone's step (Table 1) at unchanged times of its passes. A slice is an
eighth of a layer and holds the rank while it communicates itself. The search is all that Motet decides: the backbone
simulated alone, every PP of the encoder that divides 8, all partitions of microbatches, and the slices of the best; on
one core. Every placement is then simulated whole; that the step is what was predicted is checked.
"""

from __future__ import annotations

import time
from dataclasses import dataclass, replace

import numpy as np
import papers_optimus as optimus
from papers_optimus import GATHER_SHARE, GPT, NUM_CHUNKS, PP, TABLES_5_7, VIT, Constants, Published
from rich.console import Console
from rich.table import Table
from rows import Row, finish, options

from motet.planner.bubble_filling.backbone_bubbles import Slices, backbone_of
from motet.planner.bubble_filling.encoder_passes import Encoders
from motet.planner.bubble_filling.fills import Filling, PlacedFills, fill
from motet.schedule import (
    EncoderPipeline,
    Program,
    add_data_parallel,
    fill_bubbles,
    interleaved_1f1b,
    split_parts,
)
from motet.schedule.layout import LAYER_PARTS
from motet.simulate import simulate
from motet.simulate.engine.stage_times import Part, StageTimes

NUM_STAGES = PP * NUM_CHUNKS
TENSOR_SHARE = 0.112
"""Of the step; Table 1."""
SLICES = 8
"""Of a layer's pass."""
PAPER_S = {1536: 322.2, 2048: 89.6, 3072: 15.1}
"""Runtime of the paper's bubble scheduler; Table 7."""


@dataclass(frozen=True, eq=False)
class Search:
    """Of the best encoder plan. alone_s: the backbone's own step. took_s: the search."""

    encoders: Encoders
    coarse: PlacedFills
    fine: PlacedFills
    alone_s: float
    took_s: float


def backbone_times(column: Published, constants: Constants, *, tensor: bool) -> StageTimes:
    """Of 96 stages of a layer; where their tensor-parallel communication is told apart, in parts."""
    forward_s, backward_s = np.array(optimus._layers_s(GPT, constants)).T[:, :, None]
    share, halves = 0.0, {}
    if tensor:
        step_s = optimus._llm(column, constants).makespan_s
        per_rank_s = column.num_microbatches * float((forward_s + backward_s).sum()) / PP
        share = TENSOR_SHARE * step_s / per_rank_s
        halves = dict.fromkeys(range(NUM_STAGES), (Part(0.5, "tensor"), Part(0.5)) * (LAYER_PARTS // 2))
    gather_s = constants.dp_bubble_s * GATHER_SHARE
    return StageTimes(
        (1 - share) * forward_s,
        (1 - share) * backward_s / 2,
        (1 - share) * backward_s / 2,
        forward_tensor_s=share * forward_s,
        backward_tensor_s=share * backward_s,
        gather_s=np.full(NUM_STAGES, gather_s),
        reduce_s=np.full(NUM_STAGES, constants.dp_bubble_s - gather_s),
        forward_parts=halves,
        backward_parts=halves,
    )


def backbone_program(column: Published, times: StageTimes) -> Program:
    program = interleaved_1f1b(PP, NUM_CHUNKS, column.num_microbatches, deferred_warmup=True)
    for stage, parts in times.forward_parts.items():
        program = split_parts(program, stage, len(parts), len(parts))
    return program


def with_data_parallel(program: Program) -> Program:
    return add_data_parallel(program, dict.fromkeys(range(PP), 1), range(NUM_STAGES))


def search(column: Published, constants: Constants, times: StageTimes) -> Search:
    started = time.process_time()
    alone = simulate(with_data_parallel(backbone_program(column, times)), times)
    backbone = backbone_of(alone, column.num_microbatches)
    layers_s = np.array(optimus._layers_s(VIT, constants)).mean(axis=0)
    found: list[tuple[Encoders, Filling]] = []
    for pp in (1, 2, 4, 8):
        forward, backward = (((Slices(float(s) / SLICES, SLICES * len(VIT.blocks) // pp),),) * pp for s in layers_s)
        encoders = Encoders(forward, backward)
        found.append((encoders, fill(backbone, encoders, NUM_STAGES)))
    encoders, filling = min(found, key=lambda one: one[1].fine_s)
    coarse, fine = filling.coarse, filling.fine
    return Search(encoders, coarse, fine, alone.makespan_s, time.process_time() - started)


def simulated_s(column: Published, times: StageTimes, encoders: Encoders, placed: PlacedFills) -> float:
    """The step of a placement, simulated with its encoders."""
    num_pipelines = len(placed.pipelines)
    pipelines = [
        EncoderPipeline("image", tuple(range(j, PP, num_pipelines)), own) for j, own in enumerate(placed.pipelines)
    ]
    program = fill_bubbles(backbone_program(column, times), pipelines, placed.fills)
    passes_s = [
        [sum(s * num for s, num in place) for place in passes] for passes in (encoders.forward, encoders.backward)
    ]
    forward_s, backward_s = (np.tile(seconds, num_pipelines)[:, None] for seconds in passes_s)
    silent = np.zeros(PP)
    whole = replace(
        times,
        forward_s=np.concatenate([times.forward_s, forward_s]),
        input_s=np.concatenate([times.input_s, backward_s / 2]),
        weight_s=np.concatenate([times.weight_s, backward_s / 2]),
        forward_tensor_s=np.concatenate([times.forward_tensor_s, silent[:, None]]),
        backward_tensor_s=np.concatenate([times.backward_tensor_s, silent[:, None]]),
        gather_s=np.concatenate([times.gather_s, silent]),
        reduce_s=np.concatenate([times.reduce_s, silent]),
    )
    return simulate(with_data_parallel(program), whole).makespan_s


def main() -> None:
    sizes = [str(column.num_gpus) for column in TABLES_5_7]
    asked = options(__doc__, sizes, reads_lengths=False, draws=False).parse_args()
    rows: list[Row] = []
    constants = optimus.constants()
    table = Table(title="Optimus, Table 7: share of the encoder's computation in bubbles, and what the step takes")
    for name in ("GPUs", "microbatches", "who", "bubbles"):
        table.add_column(name, no_wrap=True)
    for name in ("Eff_coarse", "Eff_fine", "backbone s", "coarse s", "fine s", "encoder PP", "search s"):
        table.add_column(name, justify="right", no_wrap=True)
    for column in TABLES_5_7:
        if asked.only not in ("", str(column.num_gpus)):
            continue
        who = f"{column.num_gpus:,}", f"{column.num_microbatches}"
        shares = f"{column.coarse:.1%}", f"{column.fine:.1%}"
        table.add_row(
            *who, "paper", "PP and TP", *shares, "", "", f"{column.optimus_s:.2f}", "", f"{PAPER_S[column.num_gpus]}"
        )
        for tensor, bubbles in ((False, "PP"), (True, "PP and TP")):
            times = backbone_times(column, constants, tensor=tensor)
            found = search(column, constants, times)
            coarse, fine = found.coarse, found.fine
            ways = ("coarse", coarse), ("fine", fine)
            for _, placed in ways:
                step_s = simulated_s(column, times, found.encoders, placed)
                if not np.isclose(step_s, placed.step_s, rtol=1e-6):
                    raise SystemExit(f"{column}: predicted {placed.step_s:.4f} s, simulated {step_s:.4f} s.")
            seconds = (f"{s:.2f}" for s in (found.alone_s, coarse.step_s, fine.step_s))
            case = f"{column.num_gpus} GPUs, bubbles of {bubbles}"
            rows += [Row(f"{case}: share in bubbles, {way}", float(one.hidden)) for way, one in ways]
            rows += [Row(f"{case}: seconds of a step, {way}", float(one.step_s)) for way, one in ways]
            shares = f"{coarse.hidden:.1%}", f"{fine.hidden:.1%}"
            table.add_row("", "", "Motet", bubbles, *shares, *seconds, f"{found.encoders.pp}", f"{found.took_s:.1f}")
        table.add_section()
    Console(width=140).print(table)
    finish(rows, asked.json, seed=asked.seed)


if __name__ == "__main__":
    main()
