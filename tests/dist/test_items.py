"""Exchange mode: whatever ranks loaded arrives, bit for bit, where it is computed; bad examples vanish on all alike."""

from __future__ import annotations

import threading
from collections.abc import Iterable
from dataclasses import replace

import numpy as np
import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image

from motet.core.example import Media, Pixels, TokenSequence
from motet.core.workload import BACKBONE
from motet.data.images import ImageTransform
from motet.dispatch import ItemExchange, LoadedExample, Orchestrator, Packed, Padded, compose_route
from motet.dispatch.exchange import exchange_rows
from motet.dispatch.loaded import LoadedTables, tables_of
from motet.dispatch.message import (
    MediaShape,
    example_bytes,
    media_bytes,
    read_example,
    read_media,
    write_example,
    write_media,
)
from ranks import run_ranks

MEAN, STD = (0.48145466, 0.4578275, 0.40821073), (0.26862954, 0.26130258, 0.27577711)
COSTS = {BACKBONE: Packed(), "image": Packed(), "audio": Padded()}


class Halves:
    """A measure: an item's length is the product of its sizes, and it takes half as many tokens, rounded down."""

    def lengths(self, sizes):
        return np.prod(sizes, axis=1)

    def num_tokens(self, sizes):
        return np.prod(sizes, axis=1) // 2


def draw_item(rng: np.random.Generator, phase: str, size: np.ndarray) -> Media:
    """Of three images, two are made of pixels, one of these with repeats."""
    if phase == "image" and (num_repeats := int(rng.integers(0, 3))):
        pixels = Pixels(np.float32([0.5, 0.4, 0]), np.float32([0.2, 0.4, 1]), num_repeats)
        return Media(pixels.rows(rng.integers(0, 256, (size.prod(), 3), dtype=np.uint8)), size, pixels)
    return Media(rng.standard_normal((size.prod(), 3 if phase == "image" else 2)).astype(np.float32), size)


def draw(rng: np.random.Generator) -> LoadedExample:
    phases = tuple(str(phase) for phase in rng.choice(["image", "audio"], rng.integers(0, 4)))
    sizes = [rng.integers(1, 5, 2) if phase == "image" else rng.integers(1, 9, 1) for phase in phases]
    items = [draw_item(rng, phase, size) for phase, size in zip(phases, sizes)]
    length = len(phases) + int(rng.integers(1, 9))
    places = np.sort(rng.choice(length, len(phases), replace=False))
    tokens, targets = rng.integers(0, 2**40, length), rng.random(length) < 0.5
    return LoadedExample(TokenSequence(tokens, targets, phases, places), tuple(items))


def same(a, b) -> bool:
    """Whether two sequences, items or Pixels are equal, types of arrays included."""
    if type(a) is not type(b) or not hasattr(a, "__dict__") or isinstance(a, np.ndarray):
        return np.array_equal(a, b) and getattr(a, "dtype", 0) == getattr(b, "dtype", 0)
    return all(same(x, y) for x, y in zip(vars(a).values(), vars(b).values(), strict=True))


@given(st.integers(0, 10_000))
def test_messages_read_back_what_was_written(seed):
    example = draw(np.random.default_rng(seed))
    sequence = example.sequence
    data = np.zeros(example_bytes(len(sequence.tokens), len(places := sequence.num_pieces)), np.uint8)
    write_example(sequence, data)
    assert same(read_example(data, len(sequence.tokens), sequence.media, places), sequence)
    for media in example.media:
        shape = MediaShape.of(media)
        data = np.zeros(media_bytes(shape), np.uint8)
        write_media(media, data)
        assert same(read_media(data, shape), media)


def test_pixels_travel_as_bytes_and_arrive_as_the_same_floats():
    transform = ImageTransform(patch_size=14, merge_size=2, temporal_patch_size=2, mean=MEAN, std=STD)
    noise = np.random.default_rng(0).integers(0, 256, (56, 84, 3), dtype=np.uint8)
    media = transform(Image.fromarray(noise))
    shape = MediaShape.of(media)
    data = np.zeros(media_bytes(shape), np.uint8)
    write_media(media, data)
    read = read_media(data, shape)
    assert np.array_equal(read.values, media.values) and np.array_equal(read.size, media.size)
    # Two repeats of four bytes come to one byte, and some for size, scale and shift.
    assert len(data) == media.values.nbytes // 8 + 16 + 24
    data[:] = 0
    write_media(read, data)
    assert np.array_equal(read_media(data, shape).values, media.values)
    for change in (0.001, np.nan):
        with pytest.raises(ValueError, match="not those of its pixels"):
            write_media(replace(media, values=media.values + np.float32(change)), data)


def check_items(rank: int, num_ranks: int, seeds: list[int]) -> list[str]:
    group = dist.new_group(backend="gloo")
    wrong: list[str] = []

    def work():
        for seed in seeds:
            wrong.extend(check_batch(rank, num_ranks, group, seed))

    # As in training: in a thread, while the main thread talks on another group.
    thread = threading.Thread(target=work)
    thread.start()
    dist.barrier()
    thread.join()
    return wrong


def check_batch(rank: int, num_ranks: int, group, seed: int, carrier=None) -> list[str]:
    rng = np.random.default_rng(seed)
    # Ranks hold different numbers of examples, some none; every fifth could not be loaded.
    held = [[None if rng.random() < 0.2 else draw(rng) for _ in range(rng.integers(0, 6))] for _ in range(num_ranks)]
    balanced = [(), (BACKBONE,), tuple(COSTS)][seed % 3]
    measures = {"image": Halves(), "audio": Halves()}
    communicator = ["all_to_all", "all_gather"][seed % 2]
    options = {"node_wise": seed % 5 > 0, "communicator": communicator, "ranks_per_node": 2}
    orchestrator = Orchestrator(COSTS, num_ranks, balanced, **options)
    exchange = ItemExchange(group, orchestrator, measures, capacity=8, carrier=carrier)
    carried = []
    carry = getattr(exchange.carrier, communicator)
    setattr(exchange.carrier, communicator, lambda outgoing, *sizes: carried.append(sizes) or carry(outgoing, *sizes))
    got = exchange(held[rank])
    everything = [example for examples in held for example in examples]
    kept = [example for example in everything if example is not None]
    wrong = []
    if got.kept.tolist() != [example is not None for example in everything]:
        wrong.append("kept")
    items = {p: [m for e in kept for q, m in zip(e.sequence.media, e.media) if q == p] for p in measures}
    sequences = [kept[i].sequence for i in got.decision.backbone.on_rank(rank)]
    pairs = [("sequences", got.sequences, sequences)]
    pairs += [(p, got.media[p], [items[p][i] for i in got.decision.assignments[p].on_rank(rank)]) for p in measures]
    for name, found, expected in pairs:
        if len(found) != len(expected) or not all(map(same, found, expected)):
            wrong.append(name)
    own = {id(thing) for e in held[rank] if e is not None for thing in (e.sequence, *e.media)}
    stays = sum(id(thing) in own for things in (sequences, *(pair[2] for pair in pairs[1:])) for thing in things)
    kept_as_is = sum(id(thing) in own for things in (got.sequences, *got.media.values()) for thing in things)
    if stays != kept_as_is:
        wrong.append("what stays was copied")
    if carried and communicator == "all_gather":
        # Each rank passes on num_ranks - 1 shares; of two nodes of two, two of the four links of the ring cross.
        [(share,)] = carried
        sent = num_ranks * (num_ranks - 1) * share
        if (got.moved_bytes, got.crossing_bytes) != (sent, sent // 2):
            wrong.append("bytes of an all-gather")
    elif bool(carried) != bool(got.moved_bytes):
        wrong.append("a collective that moves nothing, or none that does")
    if not 0 <= got.crossing_bytes <= got.moved_bytes or (num_ranks <= 2 and got.crossing_bytes):
        wrong.append("bytes")
    if not balanced and got.moved_bytes:
        wrong.append("bytes moved without balancing")
    return [f"seed {seed}, {num_ranks} ranks: {line}" for line in wrong]


def bytes_over_nodes(rank: int, num_ranks: int, tells_homes: bool) -> tuple[int, int]:
    """Input bytes that ranks exchange, and that leave nodes of 2."""
    rng = np.random.default_rng(0)
    held = [[draw(rng) for _ in range(24)] for _ in range(num_ranks)]
    orchestrator = Orchestrator(COSTS, num_ranks, COSTS, ranks_per_node=2)
    if not tells_homes:
        decide = orchestrator.decide
        orchestrator.decide = lambda lengths, _: decide(lengths)
    measures = {"image": Halves(), "audio": Halves()}
    exchange = ItemExchange(dist.new_group(backend="gloo"), orchestrator, measures)
    got = exchange(held[rank])
    return got.moved_bytes, got.crossing_bytes


def test_few_inputs_leave_their_node():
    (moved, crossed), *_ = run_ranks(bytes_over_nodes, 4, True)
    (moved_before, crossed_before), *_ = run_ranks(bytes_over_nodes, 4, False)
    assert moved < moved_before
    assert 0 < crossed < 0.6 * crossed_before


def outputs_over_nodes(rank: int, num_ranks: int, seeds: list[int]) -> list[list[int]]:
    """Index mode, where no input moves. For each seed and phase, encoder output rows that this rank sends to the other
    node of 2, without and with node-wise placement.
    """
    return [pair for seed in seeds for pair in outputs_of(rank, num_ranks, seed)]


def outputs_of(rank: int, num_ranks: int, seed: int) -> Iterable[list[int]]:
    rng = np.random.default_rng(seed)
    examples = [draw(rng) for _ in range(24 * num_ranks)]
    measures = {"image": Halves(), "audio": Halves()}
    lengths = LoadedTables.read([tables_of(examples, tuple(measures), measures)], tuple(measures)).lengths
    sent: dict[str, list[int]] = {phase: [] for phase in measures}
    for node_wise in (False, True):
        decision = Orchestrator(COSTS, num_ranks, COSTS, ranks_per_node=2, node_wise=node_wise).decide(lengths)
        for phase, items in lengths.items.items():
            encoder = decision.assignments[phase]
            route = compose_route(encoder, decision.backbone, items, rank, ranks_per_node=2)
            first = np.cumsum(items.num_tokens) - items.num_tokens  # Each row of an item has a number of its own.
            numbers = [torch.arange(first[i], first[i] + items.num_tokens[i]) for i in encoder.on_rank(rank)]
            got = exchange_rows(torch.cat([torch.zeros(0, dtype=torch.int64), *numbers]), route, dist.group.WORLD)
            ranks, order = decision.backbone.follow(items.example)
            wanted = [n for i in order[ranks[order] == rank] for n in range(first[i], first[i] + items.num_tokens[i])]
            assert got.tolist() == wanted
            there = range(2) if rank >= 2 else range(2, 4)
            sent[phase].append(sum(route.send_splits[other] for other in there))
    return sent.values()


def test_the_busiest_rank_sends_fewer_outputs_to_the_other_node():
    """What Algorithm 3 of OrchMLLM minimises; the sum over ranks may stay."""
    before, after = np.max(run_ranks(outputs_over_nodes, 4, list(range(6))), axis=0).T
    assert (after <= before).all()
    assert after.sum() < 0.96 * before.sum()


def test_items_arrive_whole_where_they_are_computed():
    for num_ranks in (1, 4):
        assert run_ranks(check_items, num_ranks, list(range(30))) == [[]] * num_ranks
