import os
import signal
import time

import numpy as np
import pytest

from motet.core.example import Media
from motet.data.audio import AudioTransform
from motet.data.decode import Decoder
from motet.data.images import ImageTransform
from motet.data.media import BadMedia, MediaRef
from motet.data.workers import WorkerDied, WorkerPool
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
        if task == "sleep":
            time.sleep(60)
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


def test_a_killed_worker_is_an_error_and_not_a_hang():
    with WorkerPool(2, Obey) as pool:
        futures = [pool.submit(task) for task in ("a", "die")]
        assert futures[0].result(10) == ("hello", "a")
        with pytest.raises(
            WorkerDied, match=r"worker process \d was killed by SIGKILL while it had 'die'; is the machine"
        ):
            futures[1].result(10)


def test_after_a_death_every_task_fails():
    with WorkerPool(1, Obey) as pool:
        futures = [pool.submit(task) for task in ("die", "b")]
        for future in [*futures, pool.submit("c")]:
            with pytest.raises(WorkerDied):
                future.result(10)


@pytest.mark.parametrize("num_workers", [0, 1])
def test_errors_of_a_handler_are_raised_here(num_workers):
    with WorkerPool(num_workers, Obey, "hi") as pool:
        with pytest.raises(KeyError, match="as told"):
            pool.submit("fail").result(10)
        assert pool.submit([1, None]).result(10) == ("hi", [1, None])


def test_a_handler_that_cannot_be_made():
    with WorkerPool(1, Obey, "refuse") as pool, pytest.raises(ValueError, match="no handler today"):
        pool.submit("a").result(10)


def test_workers_end_with_their_pool_and_with_their_parent():
    with WorkerPool(1, Obey) as pool:
        number = pool.submit("pid").result(10)
        assert number != os.getpid()
    assert not alive(number)

    # A parent that is killed closes the sockets with it.
    read, write = os.pipe()
    child = os.fork()
    if child == 0:
        inner = WorkerPool(1, Obey)
        os.write(write, str(inner.submit("pid").result(10)).encode())
        os.kill(os.getpid(), signal.SIGKILL)
    os.waitpid(child, 0)
    orphan = int(os.read(read, 20))
    deadline = time.monotonic() + 5
    while alive(orphan) and time.monotonic() < deadline:
        time.sleep(0.02)
    assert not alive(orphan)


def alive(process: int) -> bool:
    try:
        with open(f"/proc/{process}/stat") as stat:
            return stat.read().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False
