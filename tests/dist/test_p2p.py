"""Lanes between ranks: messages arrive in order in both directions, and a link that is broken is one sentence."""

import pytest
import torch
import torch.distributed as dist

from dist.test_strict_lanes import WIDTH, pairs_of, walk
from motet.core.errors import UserError
from motet.runtime.p2p import Inbox, Lanes
from motet.schedule import add_communication, gpipe, one_f_one_b
from ranks import run_ranks

SIZES = [3, 1, 70_000, 2, 5, 4, 300_000, 6]
CPU = torch.device("cpu")


def cross(rank, num_ranks):
    """Both ranks send all before they take any: with one lane for both directions that could hang."""
    lanes = Lanes([(0, 1), (1, 0)], rank, CPU)
    lanes.connect()
    inbox = Inbox(lanes, 1 - rank, SIZES, torch.empty(0, dtype=torch.float64))
    for number, size in enumerate(SIZES):
        lanes.send(torch.full((size,), float(10 * rank + number), dtype=torch.float64), 1 - rank)
    taken = [inbox.take() for _ in SIZES]
    lanes.wait_for_sends()
    return [(len(message), message.unique().tolist()) for message in taken]


def test_messages_of_both_directions_arrive_in_order():
    for rank, taken in enumerate(run_ranks(cross, 2)):
        assert taken == [(size, [10.0 * (1 - rank) + number]) for number, size in enumerate(SIZES)]


def broken(rank, num_ranks):
    lanes = Lanes([(0, 1), (1, 0)], rank, CPU)

    def refuse(*args, **kwargs):
        raise RuntimeError("Connection refused by peer.\nand much more")

    isend, dist.isend = dist.isend, refuse
    try:
        if rank == 0:
            with pytest.raises(UserError) as refused:
                lanes.connect()
            return str(refused.value)
    finally:
        dist.isend = isend
    return ""


def test_a_broken_link_is_named_in_one_sentence():
    said, _ = run_ranks(broken, 2)
    assert said == "Rank 0 cannot send to rank 1, as the plan has it do: Connection refused by peer."


NUM_MICROBATCHES = 8


class CountedLanes(Lanes):
    """most_bytes: of messages that were kept at a time."""

    most_bytes = 0

    def send(self, message, receiver):
        super().send(message, receiver)
        self.most_bytes = max(self.most_bytes, self.kept_bytes)


def most_kept(rank, num_ranks, programs):
    """Of each Program, the most messages that this rank has kept at a time; and what is kept behind the last one."""
    lanes, most = CountedLanes(pairs_of(programs), rank, CPU), []
    for program in programs:
        lanes.most_bytes = 0
        walk(program, rank, lanes)
        most.append(lanes.most_bytes // (8 * WIDTH))
        dist.barrier()
    return most, lanes.kept_bytes


def test_a_message_is_freed_when_an_answer_shows_that_it_has_arrived():
    """gloo says of no message that it has left; those of a whole step would be kept."""
    programs = [add_communication(make(2, NUM_MICROBATCHES)) for make in (one_f_one_b, gpipe)]
    first, last = run_ranks(most_kept, 2, programs)
    assert first == ([2, NUM_MICROBATCHES], 0)  # GPipe has no answer before all are sent.
    assert last[0][0] == 2 and last[1] == 0
