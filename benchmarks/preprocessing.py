"""MMScale's Figure 21 (section 7.3.2): what a step waits for its images, by resolution and number of images.

    python benchmarks/preprocessing.py [--steps 6] [--cores 1] [--seed 0] [--json preprocessing.json] [--only figure]

Real JPEGs, decoded and made into Qwen2-VL's patches by Motet's own `Decoder`: in the step itself, in local workers, and
in Ray's actors on this machine, which also send their results through Ray's object store. The step is **emulated**: it
sleeps, once half longer than the service takes for its images (its cores suffice), and once half as long (they do not).
A stall is the share of a step that waits. Medians over steps without the first two.

"predicted": steps without enough cores, as `motet plan` predicts them: by a line through files that a worker or an
actor was timed on, one by one (`cost/decoding.py`). A machine's speed changes within a minute, so files are timed
before and after every few steps, and what counts is the median of predicted over measured. Steps have other images.

"work": the same prediction in processor time of the worker and of the rank that is handed its items, which neighbours
on the machine change less: what the line through timed files says of a step, over what its images took. Linux alone.

"peer": images a second of one process, beside torch's DataLoader with transformers' own image processor. The DataLoader
has a process of its own, since `motet train` sets how its process keeps memory (`core/heap.py`) and a DataLoader's
users do not: with these settings it reads up to 1.8 times as many images. Medians of five rounds in turns.
"""

from __future__ import annotations

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")

import statistics
import tempfile
import time
from collections import deque
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ProcessPoolExecutor
from contextlib import ExitStack, contextmanager
from multiprocessing import get_context
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from PIL import Image
from rows import Row, finish, options, show

from motet.core.heap import keep_freed_memory, share_heap
from motet.cost.decoding import DecodingFit, DecodingLoad
from motet.cost.profile import DecodingTimes
from motet.data.decode import Decoder
from motet.data.images import ImageTransform
from motet.data.media import MediaRef
from motet.data.ray_actors import RayActor, RayCluster
from motet.data.ray_server import RayServer
from motet.data.videos import amount_of
from motet.data.worker import HandlerParts

SIDES = (256, 512, 1024)
NUM_IMAGES = (8, 16)
AHEAD, FIRST = 2, 2
"""Steps that are decoded ahead, and steps that are not counted."""
TRANSFORM = ImageTransform(patch_size=14, merge_size=2, temporal_patch_size=2)
NUM_FILES = 8
TOLERANCE = 0.1
CASE_S, MIN_ROUNDS, TIMED_FILES, AT_ONCE = 8.0, 3, 2, 4
"""Of "predicted": seconds of a case, and the least rounds of steps between timed files; files of each side, and so many
of each at once, as in training."""
WORK_STEPS, WORK_ROUNDS = 2, 5
PEER_ROUNDS = 5


def write_images(folder: Path, side: int, seed: int) -> list[MediaRef]:
    """JPEGs with large shapes and fine noise, about as hard to decode as photographs."""
    rng, refs = np.random.default_rng(seed), []
    for number in range(NUM_FILES):
        coarse = Image.fromarray(rng.integers(0, 256, (16, 16, 3), dtype=np.uint8)).resize((side, side))
        noise = rng.normal(0, 12, (side, side, 3))
        path = folder / f"{side}-{number}.jpg"
        Image.fromarray((np.asarray(coarse) + noise).clip(0, 255).astype(np.uint8)).save(path, quality=90)
        refs.append(MediaRef("image", str(path), raw=(side, side)))
    return refs


def run(decoder: Decoder, images: Sequence[MediaRef], step_s: float, num_steps: int, ahead: int) -> tuple[float, float]:
    """Median seconds that a step waits, and takes; each decodes the same images. ahead: 0 is in the step itself."""
    started: deque[list[Future]] = deque()
    waits, steps = [], []
    for _ in range(num_steps + FIRST):
        begun_s = time.perf_counter()
        while len(started) <= ahead:
            started.append(decoder.submit(images))
        for future in started.popleft():
            future.result()
        waits.append(time.perf_counter() - begun_s)
        time.sleep(step_s)
        steps.append(time.perf_counter() - begun_s)
    for futures in started:
        for future in futures:
            future.result()
    return statistics.median(waits[FIRST:]), statistics.median(steps[FIRST:])


def timed(decoder: Decoder, files: Sequence[MediaRef]) -> list[tuple[int, float]]:
    """(pixels, seconds of a worker) of each file."""
    points = []
    for ref in files:
        begun_s = time.perf_counter()
        decoder.load([ref] * AT_ONCE)
        points.append((amount_of(ref), (time.perf_counter() - begun_s) / AT_ONCE))
    return points


def core_seconds(points: Sequence[tuple[int, float]], images: Sequence[MediaRef]) -> float:
    """Seconds of a core for images, by the line through what was timed."""
    amounts, seconds = zip(*points, strict=True)
    fit = DecodingFit.of(DecodingTimes(phase="image", codec=".jpg", amounts=amounts, seconds=seconds))
    return float(fit.seconds(np.array([amount_of(ref) for ref in images], dtype=np.float64)).sum())


@contextmanager
def opened_ways(cores: int) -> Iterator[dict[str, tuple[Decoder, int]]]:
    """Each way to decode: its Decoder, and the steps that it decodes ahead."""
    transforms = {"image": TRANSFORM}
    with ExitStack() as opened:
        server = opened.enter_context(RayServer(cores))
        cluster = opened.enter_context(RayCluster(server.address, cores, server.token))
        yield {
            "in the step": (opened.enter_context(Decoder(transforms)), 0),
            "local workers": (opened.enter_context(Decoder(transforms, cores)), AHEAD),
            "service": (opened.enter_context(Decoder(transforms, cores, cluster)), AHEAD),
        }


def cases(folder: Path, seed: int) -> tuple[list[MediaRef], dict[str, list[MediaRef]]]:
    """Files to be timed, and the images of a step of each case, none of them among those files."""
    files = {side: write_images(folder, side, seed) for side in SIDES}
    images = {
        f"{count} x {side}": [files[side][TIMED_FILES + place % (NUM_FILES - TIMED_FILES)] for place in range(count)]
        for side in SIDES
        for count in NUM_IMAGES
    }
    return [ref for refs in files.values() for ref in refs[:TIMED_FILES]], images


def figure(folder: Path, cores: int, num_steps: int, seed: int) -> Iterator[Row]:
    samples, images_of = cases(folder, seed)
    with opened_ways(cores) as ways:
        timed(ways["service"][0], samples)
        for case, images in images_of.items():
            core_s = core_seconds(timed(ways["service"][0], samples), images)
            for suffices in (True, False):
                step_s = core_s / cores * (1.5 if suffices else 0.5)
                for way, (decoder, ahead) in ways.items():
                    wait_s, whole_s = run(decoder, images, step_s, num_steps, ahead)
                    goal = 0.01 if suffices and ahead else None
                    yield Row(f"{case}, emulated step of {step_s * 1e3:.0f} ms, {way}: waits", wait_s / whole_s, goal)


def predicted(folder: Path, cores: int, num_steps: int, seed: int) -> Iterator[Row]:
    samples, images_of = cases(folder, seed)
    with opened_ways(cores) as ways:
        for way, (decoder, ahead) in ways.items():
            if not ahead:
                continue
            points = [timed(decoder, samples) for _ in range(2)][1:]
            for case, images in images_of.items():
                ratios, step_s = [], core_seconds(points[-1], images) / cores / 2
                begun_s = time.perf_counter()
                while len(ratios) < MIN_ROUNDS or time.perf_counter() - begun_s < CASE_S:
                    _, whole_s = run(decoder, images, step_s, num_steps, ahead)
                    points.append(timed(decoder, samples))
                    load = DecodingLoad(core_seconds([*points[-2], *points[-1]], images), step_s, cores)
                    ratios.append((load.step_s + load.stall_s) / whole_s)
                name = f"{case}, emulated step of {step_s * 1e3:.0f} ms, {way}"
                ratio = statistics.median(ratios)
                yield Row(f"{name}: predicted step over measured", ratio, 1.0, abs(ratio - 1) <= TOLERANCE)
                yield Row(f"{name}: largest error of a round", max(abs(ratio - 1) for ratio in ratios))


class NotedCluster(RayCluster):
    """A cluster that notes the actors that are started in it."""

    def __init__(self, address: str, num_actors: int, token: str) -> None:
        self.actors: list[RayActor] = []
        super().__init__(address, num_actors, token)

    def start_actor(self, handler: HandlerParts, limit_s: float) -> RayActor:
        actor = super().start_actor(handler, limit_s)
        self.actors.append(actor)
        return actor


def children() -> set[int]:
    """Processes that this one has started and that still run."""
    tasks = Path("/proc/self/task").iterdir()
    return {int(number) for task in tasks for number in (task / "children").read_text().split()}


def processor_s(processes: Sequence[int]) -> NDArray:
    """Seconds of a processor that processes have had so far, and this one, [2]."""
    of_workers = sum(int(Path(f"/proc/{number}/schedstat").read_text().split()[0]) for number in processes)
    return np.array([of_workers * 1e-9, time.process_time()])


def work_of(decoder: Decoder, processes: Sequence[int], files: Sequence[MediaRef]) -> NDArray:
    """Seconds of a processor of the workers, and of this process, for files, [2]."""
    begun = processor_s(processes)
    decoder.load(files)
    return processor_s(processes) - begun


def work(folder: Path, cores: int, num_steps: int, seed: int) -> Iterator[Row]:
    samples, images_of = cases(folder, seed)
    before = children()
    with ExitStack() as opened:
        local = opened.enter_context(Decoder({"image": TRANSFORM}, cores))
        workers = sorted(children() - before)
        server = opened.enter_context(RayServer(cores))
        cluster = NotedCluster(server.address, cores, server.token)
        opened.enter_context(cluster)
        service = opened.enter_context(Decoder({"image": TRANSFORM}, cores, cluster))
        actors = [actor.process_id for actor in cluster.actors]
        for way, decoder, processes in (("local workers", local, workers), ("service", service, actors)):
            for _ in range(3):  # An actor's first items take longer.
                decoder.load(samples)
            for case, images in images_of.items():
                ratios, shares = [], []
                for _ in range(WORK_ROUNDS):
                    points, taken = [], np.zeros(2)
                    for number in range(WORK_STEPS):  # Files are timed between steps.
                        taken += work_of(decoder, processes, images)
                        for ref in samples if number + 1 < WORK_STEPS else ():
                            seconds = work_of(decoder, processes, [ref] * AT_ONCE).sum() / AT_ONCE
                            points.append((amount_of(ref), float(seconds)))
                    ratios.append(core_seconds(points, images) * WORK_STEPS / float(taken.sum()))
                    shares.append(float(taken[1] / taken.sum()))
                ratio = statistics.median(ratios)
                name = f"{case}, {way}, processor time"
                yield Row(f"{name}: predicted over taken", ratio, 1.0, abs(ratio - 1) <= TOLERANCE)
                yield Row(f"{name}: largest error of a round", max(abs(ratio - 1) for ratio in ratios))
                yield Row(f"{name}: share of the rank, to which items are handed", statistics.median(shares))


def images_a_second(loaded: Iterator[object], count: int) -> float:
    """Images a second, from the first one on."""
    next(loaded)
    begun_s = time.perf_counter()
    for _ in range(count - 1):
        next(loaded)
    return (count - 1) / (time.perf_counter() - begun_s)


def decoded(decoder: Decoder, refs: Sequence[MediaRef]) -> Iterator[object]:
    """The images in order, a few ahead, as a DataLoader has them."""
    started: deque[list[Future]] = deque()
    for ref in refs:
        started.append(decoder.submit([ref]))
        if len(started) > AHEAD:
            yield started.popleft()[0].result()
    for futures in started:
        yield futures[0].result()


class Processed:
    """The images as a torch Dataset of transformers' processor."""

    def __init__(self, paths: Sequence[str]) -> None:
        from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

        self.paths, self.process = paths, Qwen2VLImageProcessorPil(size={"shortest_edge": 1, "longest_edge": 10**9})

    def __len__(self) -> int:
        return len(self.paths)

    def __getitem__(self, place: int) -> object:
        with Image.open(self.paths[place]) as image:
            return self.process(image.convert("RGB"), return_tensors="pt")["pixel_values"]


def loader_speed(paths: Sequence[str]) -> float:
    """Images a second of one DataLoader worker with transformers' processor."""
    from torch.utils.data import DataLoader

    return images_a_second(iter(DataLoader(Processed(paths), None, num_workers=1)), len(paths))


def peer(folder: Path, cores: int, num_steps: int, seed: int) -> Iterator[Row]:
    """One process of each, a core a process, in turns."""
    with ProcessPoolExecutor(1, get_context("spawn")) as other:
        for side in SIDES:
            refs = write_images(folder, side, seed) * num_steps
            rounds = []
            for _ in range(PEER_ROUNDS):
                theirs = other.submit(loader_speed, [ref.path for ref in refs]).result()
                with Decoder({"image": TRANSFORM}, 1) as decoder:
                    rounds.append((theirs, images_a_second(decoded(decoder, refs), len(refs))))
            theirs, ours = (statistics.median(speeds) for speeds in zip(*rounds, strict=True))
            yield Row(f"{side}: images a second and core, DataLoader with transformers", theirs)
            yield Row(f"{side}: images a second and core, Motet", ours)
            yield Row(f"{side}: DataLoader / Motet", statistics.median(a / b for a, b in rounds), 1.0)


def main() -> None:
    parts = {part.__name__: part for part in (figure, predicted, work, peer)}
    parser = options(__doc__, parts, reads_lengths=False)
    parser.add_argument("--steps", type=int, default=6)
    parser.add_argument(
        "--cores", type=int, default=1, help="workers, and actors; the loop and Ray take some of another"
    )
    given = parser.parse_args()
    share_heap()
    keep_freed_memory()  # As training and `motet profile` do: fresh pages for items cost about what making them does.
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        for name, part in parts.items():
            if given.only in ("", name):
                for row in part(Path(folder), given.cores, given.steps, given.seed):
                    rows.append(row)
                    show(row)
    about = {"emulated": "steps", "seed": given.seed, "steps": given.steps, "cores": given.cores}
    finish(rows, given.json, **about)


if __name__ == "__main__":
    main()
