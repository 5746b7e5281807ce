"""Steps under torch's profiler: `run.profile_steps` names them, and each rank writes a trace of each.

A trace has every operator, and on a GPU every kernel, under the action of the Program that runs it. It is for
chrome://tracing or https://ui.perfetto.dev. The other steps run without the profiler, which takes time.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
from torch.profiler import ProfilerActivity, profile

from motet.runtime.clock import ActionClock
from motet.train.run_folder import writing
from motet.train.world import World

FOLDER = "profile"


@contextmanager
def profiled(
    run_dir: Path, steps: Collection[int], step: int, clock: ActionClock, world: World
) -> Iterator[Callable[[], None]]:
    """Profile the block, a step (from 1), if it is one of `steps`.

    Yields what writes the trace, to be called when the step counts as done: what ends the run then loses no step.
    It is a collective if the step is profiled, and raises JointUserError if a trace cannot be written.
    """
    if step not in steps:
        yield _write_nothing
        return
    activities = [ProfilerActivity.CPU] + [ProfilerActivity.CUDA] * (world.device.type == "cuda")
    measured = profile(activities=activities, record_shapes=True)

    def write() -> None:
        with world.together(), writing(run_dir / FOLDER):
            (run_dir / FOLDER).mkdir(parents=True, exist_ok=True)
            measured.export_chrome_trace(str(run_dir / FOLDER / f"step-{step:08d}-rank-{world.rank}.json"))

    with measured:
        clock.names = True
        try:
            yield write
        finally:
            clock.names = False
        if world.device.type == "cuda":
            torch.cuda.synchronize(world.device)  # Kernels of the step that still run are part of it.


def _write_nothing() -> None:
    pass
