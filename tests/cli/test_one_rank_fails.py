"""A failure of one rank alone ends all ranks soon, says what is wrong and where, and the run goes on exactly."""

import re
import time
from dataclasses import replace

import pytest

from cli.meddling import Meddling
from cli.on_ranks import motet_under_agent
from cli.test_stop import arguments
from cli.tiny_job import losses
from dist.test_cut_steps import EXACT
from dist.test_planned import DEEPER, FEW_CUTS, plan_of, train_under
from dist.test_planned_context import shared
from motet.core.plan_file import write_plan
from motet.train.checkpoint.contents import verify
from ranks import run_ranks

AN_ACTION, LOADING = "motet.runtime.executor:Executor._begin", "motet.train.input.{}:{}.start"
PATIENCE_S = 120
"""Far below `run.wait_limit_s`, in which ranks would wait for one that is gone; far above what ends them."""
FAULTS = {
    "an error": ("raise ValueError('odd rows')", r"failed with ValueError in {}, at \S+ of step \d: odd rows\. "),
    "no memory": ("raise MemoryError('12 GiB')", r"ran out of memory in {}, at \S+ of step \d \(12 GiB\)\. Raise .* "),
    "no file": (
        "raise OSError(5, 'I/O error', '/m/a.png')",
        r"cannot go on at the loading of step 3: /m/a\.png: I/O er",
    ),
    "no memory to decode": (
        "raise MemoryError('9 GiB')",
        r"ran out of memory at the loading of step \d \(\S+\.png: 9 GiB\)\. Lower data\.num_workers ",
    ),
    "killed": ("stop(signal.SIGKILL, os.getpid())", r"lost rank 1, which died without a word at .*step \d; the sys"),
}


def cut_over_replicas(job):
    plan = replace(shared(job, dp=2), balance="split", batch_size=2)
    plan = replace(plan, units=(replace(plan.units[0], cp=1),))
    return replace(plan, cluster=replace(plan.cluster, ranks_per_node=2))


PLANS = {
    "pipeline": lambda job: plan_of(job, FEW_CUTS),
    "sharing": shared,
    "cut over replicas": cut_over_replicas,
}
WAYS = {
    "copies": ("fsdp.shard_size=1", "run.microbatches=2"),
    "sharded": ("run.microbatches=2",),
    "cut": ("run.batch_size=2", "balance.method=split", *EXACT[-1:]),
    "cut over replicas": ("run.batch_size=2",),
}
FIXED = (*DEEPER, "checkpoint.every_steps=1")


@pytest.fixture(scope="module")
def alone(job, tmp_path_factory):
    """Losses of one process, by the examples of a step."""

    def run(size):
        run_dir = tmp_path_factory.mktemp("alone")
        run_ranks(train_under, 1, str(job), [*DEEPER, f"run.batch_size={size}", f"run.dir={run_dir}"], None)
        return losses(run_dir)

    return {size: run(size) for size in (2, 6)}


@pytest.mark.parametrize(
    ("way", "fault"),
    [
        ("pipeline", "an error"),
        *(
            pytest.param(*case, marks=pytest.mark.slow)
            for case in (
                ("copies", "no memory"),
                ("copies", "no file"),
                ("copies", "no memory to decode"),
                ("sharded", "an error"),
                ("pipeline", "no file"),
                ("pipeline", "killed"),
                ("sharing", "no memory"),
                ("sharing", "killed"),
                ("cut", "an error"),
                ("cut", "killed"),
                ("cut over replicas", "an error"),
            )
        ),
    ],
)
def test_it_ends_all_ranks_soon_and_the_run_goes_on_exactly(job, alone, tmp_path, way, fault):
    code, sentence = FAULTS[fault]
    command = [*arguments(job, tmp_path / "run", *FIXED, *WAYS.get(way, ()))]
    if way in PLANS:
        write_plan(PLANS[way](job), tmp_path / "plan.json")
        command += ["--plan", tmp_path / "plan.json"]
    size = 2 if "run.batch_size=2" in WAYS.get(way, ()) else 6
    where, call = AN_ACTION, 60 if size == 6 else 30
    if fault == "no file":
        loading = ("planned", "PlannedLoading") if way in PLANS else ("loading", "IndexLoading")
        where, call = LOADING.format(*loading), 2 * (3 if way in PLANS else 2) + 1
    if fault == "no memory to decode":
        where, call = "motet.data.images:ImageTransform.load", 5
    noted = tmp_path / "failed"
    noting = f"import pathlib; pathlib.Path({str(noted)!r}).touch(); "
    done = motet_under_agent(2, "train", *command[1:], meddling=Meddling(where, call, 1, noting + code))
    assert time.time() - noted.stat().st_mtime < PATIENCE_S
    assert done.returncode in (3, -9)
    (said,) = [line for line in done.stderr.splitlines() if line.startswith("motet train")]
    rank = 0 if fault == "killed" else 1
    modules = r"(image|audio|backbone|\w+\+audio|audio\+backbone)(\+backbone)?"
    assert re.match(f"motet train, rank {rank}: " + sentence.format(modules), said), said
    newest = re.search(r"The newest checkpoint is (step-\d+)\. The traceback is in ", said)[1]
    verify(tmp_path / "run" / "checkpoints" / newest)
    # The same command goes on; what was being written is written anew.
    done = motet_under_agent(2, "train", *command[1:])
    assert done.returncode == 0, done.stderr
    assert int(re.search(r"Resuming after step (\d+)", done.stdout)[1]) >= int(newest[5:])
    assert losses(tmp_path / "run") == pytest.approx(alone[size], rel=1e-10)
