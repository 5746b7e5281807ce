"""How long ranks wait for each other, and what is said of a rank that does not come, or is gone."""

import os
import re
import subprocess
import threading
import time
from datetime import timedelta
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from cli.meddling import PROGRAM, Meddling
from cli.on_ranks import motet_under_agent
from cli.test_stop import TORCHRUN
from cli.tiny_job import losses, write_tiny_job
from dist.test_planned import DEEPER, FEW_CUTS, plan_of
from motet.core.errors import RankFailure, has_waited_in_vain, origin_of
from motet.core.plan_file import write_plan
from motet.crash import _sentence
from motet.runtime import groups
from motet.runtime.groups import new_group
from motet.runtime.mesh import build_mesh
from motet.runtime.p2p import Inbox, Lanes
from motet.train.watch import Watch
from motet.train.world import Meeting, _tell, join_world, open_store
from ranks import run_ranks

CPU = torch.device("cpu")
SOURCES = Path(__file__).parents[2] / "src/motet"


def limits(rank, num_ranks, folder):
    dist.barrier()  # No rank leaves while others still connect to it.
    dist.destroy_process_group()
    store = dist.FileStore(f"{folder}/store", num_ranks)
    with join_world("cpu", Meeting(store, rank, num_ranks), wait_limit_s=77.0) as world:
        mesh = build_mesh(CPU, shard_size=2)
        groups = [world.control, world.saving, mesh.host_group, mesh.group, *mesh.shards.get_all_groups()]
        divided = build_mesh(CPU, shard_size=1, tensor_size=2)
        groups += [divided.group, divided.host_group, divided.shared_rows, *divided.cuts.get_all_groups()]
        groups += [new_group((0, 1, 2, 3))]
        groups += [group for pair, group in Lanes([(0, 1), (1, 0)], rank, CPU)._groups.items() if rank in pair]
        dist.barrier()
        return [group._get_backend(CPU).options._timeout for group in groups]


def test_every_group_of_a_run_waits_as_the_recipe_says(tmp_path):
    for found in run_ranks(limits, 4, str(tmp_path)):
        assert len(found) >= 7 and set(found) == {timedelta(seconds=77)}


def test_groups_of_a_run_are_made_in_one_place():
    made = {
        str(path.relative_to(SOURCES))
        for path in SOURCES.rglob("*.py")
        if re.search(r"dist\.(new_group|new_subgroups|split_group)\(", path.read_text())
    }
    # The groups of a user's own loop are as patient as torch's.
    assert made == {"runtime/groups.py", "dispatch/prefetch.py", "dispatch/carrier.py"}


def late(rank, num_ranks):
    """Rank 1 sends nothing; it goes on when rank 0 has given up. The sentence of rank 0."""
    store = dist.distributed_c10d._get_default_store()
    groups.wait_limit = lambda device: timedelta(seconds=8)
    lanes, said = Lanes([(0, 1), (1, 0)], rank, CPU), ""
    if rank == 0:
        with pytest.raises(RuntimeError) as waited:
            Inbox(lanes, 1, [3], torch.empty(0)).take()
        assert has_waited_in_vain(waited.value) and origin_of(waited.value).waits_for == 1
        said = _sentence(waited.value, "motet train", None)
        store.set("given up", "")
    store.wait(["given up"])
    return said


def test_a_message_that_does_not_come_names_its_sender():
    said, _ = run_ranks(late, 2)
    assert said == "motet train: waited 8 s for rank 1, in vain; run.wait_limit_s is how long a rank waits."


def watching(store, rank, num_ranks):
    watch = Watch(store, rank, num_ranks)
    watch.begin()
    return watch


def left(rank, num_ranks):
    """Names of the threads of a Watch that still run when its rank has left; rank 0 leaves a second later."""
    watch = watching(dist.distributed_c10d._get_default_store(), rank, num_ranks)
    if rank == 0:
        time.sleep(1)
    watch.leave()
    found = {thread.name for thread in threading.enumerate()} & {"listen", "look"}
    dist.barrier()
    return found


def test_no_thread_of_a_rank_that_left_is_met_by_the_last_word_of_another():
    """Such a thread aborts a process that ends meanwhile."""
    assert run_ranks(left, 2) == [set(), set()]


def outlived(rank, num_ranks):
    """What a rank is told that fails second, as it has lost another, and whether it is known by then who is gone."""
    store = dist.distributed_c10d._get_default_store()
    watch, told = watching(store, rank, num_ranks), None
    if rank == 1:
        store.set("failed", "0")
        notices = threading.Timer(0.5, store.clone().set, ("gone", "2"))
        notices.start()
        told = watch.fail(RuntimeError("Connection closed by peer")), store.check(["gone"])
        notices.join()
    dist.barrier()
    watch.leave()
    return told


def test_a_rank_stays_until_it_is_known_who_is_gone():
    """Who listens to it would else take it for the one that died."""
    assert run_ranks(outlived, 2)[1] == ((False, ""), True)


def told_of_a_failure(rank, num_ranks):
    """Whether rank 0 has said that it fails when rank 1, which was told so, ends."""
    store = dist.distributed_c10d._get_default_store()
    watch, has_failed = watching(store, rank, num_ranks), None
    if rank == 1:
        fails = threading.Timer(0.5, store.clone().set, ("failed", "0"))
        fails.start()
        _tell(watch, RankFailure("rank 0 failed"))
        has_failed = store.check(["failed"])
        fails.join()
    dist.barrier()
    watch.leave()
    return has_failed


def test_a_rank_stays_until_the_one_has_spoken_whose_failure_it_was_told():
    """torchrun would end that one in the midst of its sentence, or before it."""
    assert run_ranks(told_of_a_failure, 2) == [None, True]


def without_store(rank, num_ranks):
    """What a rank says whose store is gone, as where the system kills torchrun."""
    watch, said = watching(dist.distributed_c10d._get_default_store(), rank, num_ranks), []

    class Gone:
        def get(self, key):
            raise dist.DistNetworkError("failed to recv, got 0 bytes")

    watched, watch._looking = watch._looking, Gone()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("motet.train.watch.end_rank", said.append)
        watch._end()
    watch._looking = watched
    watch.leave()
    dist.barrier()
    return said


def test_a_rank_that_lost_torchrun_does_not_end_without_a_word():
    said = run_ranks(without_store, 2)
    assert said[1] == ["motet, rank 1: lost the process that started the ranks and serves their store."]


@pytest.fixture(scope="module")
def job(tmp_path_factory):
    job = write_tiny_job(tmp_path_factory.mktemp("job") / "data")
    write_plan(plan_of(job, FEW_CUTS), job.with_name("plan.json"))
    return job


PLANNED_STEP = "motet.runtime.planned_step:PlannedStep.run"


def start(job, run_dir, *overrides, meddling):
    sets = [part for each in (f"run.dir={run_dir}", *DEEPER, *overrides) for part in ("--set", each)]
    train = ["train", str(job), "--plan", str(job.with_name("plan.json")), *sets]
    return subprocess.Popen(
        [*TORCHRUN, PROGRAM, *meddling.arguments(), *train],
        env=os.environ | {"OMP_NUM_THREADS": "1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def ended(process):
    try:
        out, err = process.communicate(timeout=400)
    finally:
        process.kill()
    said = [line for line in err.splitlines() if line.startswith("motet")]
    return process.returncode, said, out + err


@pytest.mark.slow
@pytest.mark.torchrun
def test_a_rank_that_does_not_come_is_named_with_the_action_that_waits_for_it(job, tmp_path):
    sleeps = "import time; signal.signal(signal.SIGTERM, signal.SIG_DFL); time.sleep(500)"
    code, said, text = ended(start(job, tmp_path, "run.wait_limit_s=20", meddling=Meddling(PLANNED_STEP, 3, 1, sleeps)))
    assert code != 0 and "exitcode  : 3" in text
    assert len(said) == 1, text
    assert said[0].startswith(
        "motet train, rank 0: waited 20 s for rank 1 at 0RECV_B0<1 of step 3, in vain, as rank 1 has not come and not "
        "ended; run.wait_limit_s is how long a rank waits. There is no checkpoint. The traceback is in "
    )
    assert len(losses(tmp_path)) == 2


@pytest.mark.slow
@pytest.mark.parametrize("where", ["watch:Watch.begin", "world:_on_even_nodes"])
def test_a_rank_that_does_not_come_behind_the_meeting_is_named(job, tmp_path, where):
    """Before ranks watch each other, they would have waited for it for ever; then, without a name."""
    options = (f"run.dir={tmp_path}", "run.wait_limit_s=5", *DEEPER)
    sets = [part for each in options for part in ("--set", each)]
    sleeps = Meddling(f"motet.train.{where}", 1, 1, "import time; time.sleep(500)")
    done = motet_under_agent(2, "train", job, *sets, meddling=sleeps)
    said = [line for line in done.stderr.splitlines() if line.startswith("motet")]
    assert done.returncode == 3 and len(said) == 1, done
    assert said[0].startswith(
        "motet train, rank 0: waited 5 s, in vain, as rank 1 has not come and not ended; run.wait_"
    )


@pytest.mark.slow
@pytest.mark.torchrun
@pytest.mark.parametrize("where", ["in a message", "far from any"])
def test_a_rank_whose_process_is_gone_is_named(job, tmp_path, where):
    """Rank 0 waits for a message of rank 1, or is in work of its own that would take minutes."""
    dies = "stop(signal.SIGKILL, os.getpid())"
    if where == "far from any":
        dies = (
            "import time; os.environ['RANK'] == '1' and stop(signal.SIGKILL, os.getpid()); "
            "signal.signal(signal.SIGTERM, signal.SIG_IGN); time.sleep(500)"
        )
    rank = 1 if where == "in a message" else -1
    code, said, text = ended(start(job, tmp_path, meddling=Meddling(PLANNED_STEP, 3, rank, dies)))
    assert code != 0
    assert len(said) == 1, text
    if where == "in a message":
        # A rank that is late may see it before its first action of the step.
        at = r"(0\S+ of step 3|step 3|the loading of step \d)"
        assert re.match(rf"motet train, rank 0: lost rank 1, which died without a word at {at}; the sy", said[0])
    else:
        assert said[0] == "motet, rank 0: lost rank 1, which died without a word."


@pytest.mark.slow
@pytest.mark.torchrun
def test_a_rank_that_is_stopped_and_goes_on_ends_nothing(job, tmp_path):
    """Longer than ranks look after each other; a helper lets it go on."""
    stops = (
        "import subprocess, sys; subprocess.Popen([sys.executable, '-c', 'import os, sys, time; time.sleep(20); "
        "os.kill(int(sys.argv[1]), 18)', str(os.getpid())]); stop(signal.SIGSTOP, os.getpid())"
    )
    code, said, text = ended(start(job, tmp_path, meddling=Meddling(PLANNED_STEP, 3, 1, stops)))
    assert (code, said) == (0, []), text
    assert len(losses(tmp_path)) == 8


def test_stores_that_watch_have_a_second_connection():
    store = dist.PrefixStore("attempt", open_store("localhost", 0, serves=True))
    store.clone().set("key", "value")
    assert store.get("key") == b"value"
