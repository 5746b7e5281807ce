import os
import signal
import subprocess
import threading
import time
from pathlib import Path

import numpy as np
import pytest

import motet.data.workers
from motet.core.errors import UserError
from motet.core.example import Media
from motet.data.audio import AudioTransform
from motet.data.decode import Decoder, _ElsewhereLoader, _NotOpened, loaded_items
from motet.data.images import ImageTransform
from motet.data.listed_frames import held_frames
from motet.data.media import LISTED, BadMedia, MediaRef, Unusable
from motet.data.media_names import FrameNames
from motet.data.worker import Death
from motet.data.workers import WorkerDied, WorkerPool
from ranks import TIMEOUT_S
from unit.data.samples import write_clip, write_image

TRANSFORMS = {"image": ImageTransform(6), "audio": AudioTransform(num_mels=8)}


class Obey:
    """A handler for tests: does what the task says."""

    def __init__(self, greeting: str = "hello") -> None:
        if greeting == "refuse":
            raise ValueError("no handler today")
        self.greeting = greeting

    def __call__(self, task):
        if task == "die":
            os.kill(os.getpid(), signal.SIGKILL)
        if isinstance(task, Path) and not task.exists():
            task.touch()
            os.kill(os.getpid(), signal.SIGKILL)
        if task == "sleep":
            time.sleep(TIMEOUT_S)
        if task == "fail":
            raise KeyError("as told")
        if task == "pid":
            return os.getpid()
        return self.greeting, task


@pytest.fixture
def refs(tmp_path):
    write_image(tmp_path / "a.png", 240, 120)
    write_clip(tmp_path / "b.wav", 1600)
    cut = write_image(tmp_path / "cut.png", 60, 60)
    cut.write_bytes(cut.read_bytes()[:2000])
    names = [("image", "a.png"), ("audio", "b.wav"), ("image", "cut.png"), ("audio", "missing.wav"), ("image", "a.png")]
    return [MediaRef(modality, str(tmp_path / name)) for modality, name in names]


@pytest.mark.parametrize("num_workers", [0, 2])
def test_media_come_in_order_and_bad_ones_as_such(refs, num_workers):
    with Decoder(TRANSFORMS, num_workers) as decoder:
        for _ in range(2):
            image, clip, cut, missing, again = decoder.load(refs)
    assert isinstance(image, Media) and isinstance(clip, Media)
    assert image.values.shape == (800, 108) and image.size.tolist() == [20, 40]
    assert clip.values.shape == (10, 8)
    np.testing.assert_array_equal(image.values, again.values)
    # Handed over, not lent.
    image.values[0] += 1
    assert isinstance(cut, BadMedia) and "truncated" in cut.reason and cut.path == refs[2].path
    assert isinstance(missing, BadMedia) and missing.reason == "no such file"
    with Decoder(TRANSFORMS) as alone:
        np.testing.assert_array_equal(alone.load(refs[:1])[0].values, again.values)


def test_what_takes_longest_is_begun_first_and_comes_in_order(monkeypatch):
    begun = []
    submit = WorkerPool.submit

    def noting(self, task):
        begun.append(task[0].raw)
        return submit(self, task)

    monkeypatch.setattr(WorkerPool, "submit", noting)
    sizes = [(2, 3), (40, 50), (9, 9)]
    with Decoder(TRANSFORMS) as decoder:
        loaded = decoder.load([MediaRef("image", f"{width}.png", raw=(width, height)) for width, height in sizes])
    assert begun == [(40, 50), (9, 9), (2, 3)]
    assert [bad.path for bad in loaded] == ["2.png", "40.png", "9.png"]


def test_a_task_that_kills_its_worker_fails_alone():
    with WorkerPool(2, Obey) as pool:
        futures = [pool.submit(task) for task in ("a", "die", "b", "c")]
        with pytest.raises(WorkerDied, match=r"killed by SIGKILL, .* while it had 'die'") as died:
            futures[1].result(TIMEOUT_S)
        assert not died.value.is_final
        assert [futures[place].result(TIMEOUT_S)[1] for place in (0, 2, 3)] == ["a", "b", "c"]


def test_a_worker_that_dies_once_is_replaced_and_its_task_done(tmp_path):
    with WorkerPool(1, Obey) as pool:
        assert pool.submit(tmp_path / "die once").result(TIMEOUT_S) == ("hello", tmp_path / "die once")


def test_a_worker_that_hangs_counts_as_dead():
    with WorkerPool(1, Obey, limit_s=0.5) as pool, pytest.raises(WorkerDied, match=r"gave no answer within 0\.5 s"):
        pool.submit("sleep").result(TIMEOUT_S)


def test_a_pool_that_fails_does_not_wait_for_what_runs():
    pool = WorkerPool(1, Obey, limit_s=2 * TIMEOUT_S)
    running = pool.submit("sleep")
    wait_until(running.running)
    pool.__exit__(KeyError, None, None)
    with pytest.raises(WorkerDied, match="was closed"):
        running.result(0)


def test_where_workers_go_on_dying_every_task_fails(monkeypatch):
    monkeypatch.setattr(motet.data.workers, "_MAX_POOL_DEATHS", 4)
    with WorkerPool(1, Obey) as pool:
        futures = [pool.submit(task) for task in ("die", "die", "b")]
        with pytest.raises(WorkerDied):
            futures[0].result(TIMEOUT_S)
        for future in [*futures[1:], pool.submit("c")]:
            with pytest.raises(WorkerDied, match="4 workers have died; is the machine short of memory"):
                future.result(TIMEOUT_S)


class Elsewhere:
    """Workers of two machines. `gone` has those that died, without a word; there is room for others again if `room`."""

    name = "actor"
    gone, room, begun = set(), threading.Event(), []

    def __init__(self, handler, limit_s):
        make_handler, args = handler
        self.handler, self.machine = make_handler(*args), len(self.begun) % 2
        self.begun.append(self)

    def ready(self, may_wait):
        while len(self.begun) > 2 and not self.room.wait(0.01):
            if not may_wait():
                raise UserError("no room.")

    def run(self, task):
        if self.machine in self.gone:
            raise EOFError
        return True, self.handler(task)

    def cause_of_death(self, error):
        return Death("died with its machine", by_task=False)

    def kill(self):
        pass

    def end(self):
        pass


@pytest.fixture
def elsewhere(monkeypatch):
    for name, fresh in (("gone", set()), ("room", threading.Event()), ("begun", [])):
        monkeypatch.setattr(Elsewhere, name, fresh)
    return Elsewhere


def wait_until(held):
    deadline = time.monotonic() + TIMEOUT_S
    while not held():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def test_a_machine_that_dies_costs_no_task_and_its_workers_wait_for_room(elsewhere):
    with WorkerPool(2, Obey, start=elsewhere) as pool:
        assert pool.submit(0).result(TIMEOUT_S)[1] == 0
        elsewhere.gone.add(1)
        wait_until(lambda: pool.submit(0).result(TIMEOUT_S) and pool.num_deaths)
        assert [pool.submit(task).result(TIMEOUT_S)[1] for task in range(9)] == [*range(9)]
        assert pool.num_workers == 1
        elsewhere.gone.clear()
        elsewhere.room.set()
        wait_until(lambda: pool.num_workers == 2)
    assert pool.num_deaths == 1


def test_a_pool_closes_though_a_worker_waits_for_room(elsewhere):
    with WorkerPool(2, Obey, start=elsewhere) as pool:
        elsewhere.gone.add(1)
        wait_until(lambda: pool.submit(0).result(TIMEOUT_S) and pool.num_deaths)


def test_a_pool_ends_with_its_last_machine(elsewhere):
    with WorkerPool(2, Obey, start=elsewhere) as pool:
        elsewhere.gone |= {0, 1}
        for future in [pool.submit(task) for task in range(9)]:
            with pytest.raises(WorkerDied, match=r"^an actor has died, and no other .* \(no room\)$") as died:
                future.result(TIMEOUT_S)
            assert died.value.is_final


def test_processes_that_cannot_be_started_are_a_sentence(monkeypatch):
    def refuse(*_, **__):
        raise OSError(11, "Resource temporarily unavailable")

    monkeypatch.setattr(subprocess, "Popen", refuse)
    with pytest.raises(UserError, match=r"worker process 1 of 3 cannot be started \(Resource .*data.num_workers"):
        WorkerPool(3, Obey)


class KilledByDamage:
    """A transform whose decoder does not survive a certain file."""

    modality = "image"

    def sizes(self, raw):
        return np.ones((len(raw), 2), dtype=np.int64)

    def load(self, ref):
        if ref.path == "damaged":
            os.kill(os.getpid(), signal.SIGSEGV)
        return Media(np.zeros((1, 1), dtype=np.float32), np.ones(2, dtype=np.int64))


class OutOfMemory(KilledByDamage):
    def load(self, ref):
        raise MemoryError


@pytest.mark.parametrize("num_workers", [0, 1])
def test_memory_that_the_machine_has_not_is_no_fault_of_the_file(num_workers):
    """Else the run would go on without the example, on this machine and no other."""
    out_of_memory = pytest.raises(MemoryError, match=r"^a: none is left for what it holds")
    with Decoder({"image": OutOfMemory()}, num_workers) as decoder, out_of_memory:
        decoder.load([MediaRef("image", "a")])


def test_a_file_that_kills_its_decoder_is_bad():
    with Decoder({"image": KilledByDamage()}, 1) as decoder:
        loaded = decoder.load([MediaRef("image", name) for name in ("a", "damaged", "b")])
    assert [type(media) for media in loaded] == [Media, BadMedia, Media]
    assert str(loaded[1]) == "damaged: its decoder was killed by SIGSEGV"


class Hangs(KilledByDamage):
    def load(self, ref):
        time.sleep(TIMEOUT_S)


@pytest.mark.parametrize("num_workers", [0, 1])
def test_the_first_item_that_hangs_is_named_and_none_is_waited_for_behind_it(num_workers):
    with Decoder({"image": Hangs()}, num_workers, limit_s=1.0) as decoder:
        items = [MediaRef("image", f"{size}.png", raw=(size, size)) for size in (1, 3, 2)]
        submitted = zip(decoder.submit(items), ("line 7", "line 8", "line 9"), strict=True)
        with pytest.raises(TimeoutError) as raised:
            loaded_items((future, lambda line=line: f"train.jsonl, {line}") for future, line in submitted)
        assert decoder.num_deaths == num_workers, "it is not tried again"
    assert raised.value.filename == "train.jsonl, line 8: 3.png", "which is begun first"
    assert "decoding it has not ended in 1 s, three quarters of run.wait_limit_s" in raised.value.strerror


@pytest.mark.parametrize("num_workers", [0, 1])
def test_errors_of_a_handler_are_raised_here(num_workers):
    with WorkerPool(num_workers, Obey, "hi") as pool:
        with pytest.raises(KeyError, match="as told"):
            pool.submit("fail").result(TIMEOUT_S)
        assert pool.submit([1, None]).result(TIMEOUT_S) == ("hi", [1, None])


def test_a_handler_that_cannot_be_made():
    with WorkerPool(1, Obey, "refuse") as pool, pytest.raises(ValueError, match="no handler today"):
        pool.submit("a").result(TIMEOUT_S)


def test_workers_end_with_their_pool_and_with_their_parent():
    with WorkerPool(1, Obey) as pool:
        number = pool.submit("pid").result(TIMEOUT_S)
        assert number != os.getpid()
    assert not alive(number)

    # A parent that is killed closes the sockets with it.
    read, write = os.pipe()
    child = os.fork()
    if child == 0:
        inner = WorkerPool(1, Obey)
        os.write(write, str(inner.submit("pid").result(TIMEOUT_S)).encode())
        os.kill(os.getpid(), signal.SIGKILL)
    os.waitpid(child, 0)
    orphan = int(os.read(read, 20))
    deadline = time.monotonic() + TIMEOUT_S
    while alive(orphan) and time.monotonic() < deadline:
        time.sleep(0.02)
    assert not alive(orphan)


def alive(process: int) -> bool:
    try:
        with open(f"/proc/{process}/stat") as stat:
            return stat.read().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


class Nothing:
    def load(self, ref):
        raise Unusable("is of no use")


def test_frames_that_an_actor_cannot_open_are_told_from_bad_ones(tmp_path):
    for name in ("0.png", "1.png"):
        write_image(tmp_path / name, 8, 8)
    ref = held_frames(tmp_path, FrameNames.of(["0.png", "1.png"], 2, "line 1"), f"video 1{LISTED}", "line 1")
    load = _ElsewhereLoader({"video": Nothing()}, False)
    assert load((ref, ("video",))).reason == "is of no use"
    (tmp_path / "1.png").rename(tmp_path / "away.png")
    there = load((ref, ("video",)))
    assert isinstance(there, _NotOpened) and there.error(ref) is None, "as bad here"
    (tmp_path / "away.png").rename(tmp_path / "1.png")
    assert str(there.error(ref)).startswith(f"video 1{LISTED} (frames in {tmp_path}) can be opened here and not on Ray")
