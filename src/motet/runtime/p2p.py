"""Messages between two ranks: a lane for each direction of a pair.

A lane has a process group of its own. In each lane both ends take messages in the Program's order, which is the same
for both (`schedule/passes/communication.py`). The two directions of a pair have no common order, so that one
communicator for both could hang where a send waits for its receive (NCCL). Tags would not help: NCCL ignores them.
"""

from __future__ import annotations

from collections import Counter, defaultdict, deque
from collections.abc import Iterable, Sequence
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from motet.core.errors import UserError, note_origin
from motet.runtime.groups import new_group

POSTED_AHEAD = 4
"""Receives of a lane that wait at a time. A receive that is posted late costs the whole transfer."""


def wait_for(rank: int, work: dist.Work) -> None:
    """Wait for a message from or to a rank, which is noted on the exception if it does not come."""
    try:
        work.wait()
    except RuntimeError as error:
        note_origin(error, waits_for=rank)
        raise


class _Sent(NamedTuple):
    """A message that may be on its way. number: it is the n-th on its lane since `wait_for_sends`, from 0."""

    number: int
    work: dist.Work
    message: Tensor


class Lanes:
    """The lanes of one rank. pairs: (sender, receiver) of all lanes of the job, in one order on all ranks.

    Making them is a collective of all ranks, and so is `connect`.

    A message is kept until it has left. NCCL says when that is. gloo says it only to who waits, so that what comes back
    must show it (`arrived`).
    """

    def __init__(self, pairs: Sequence[tuple[int, int]], rank: int, device: torch.device) -> None:
        self._rank, self._device = rank, device
        self._groups = {pair: new_group(sorted(pair)) for pair in pairs}
        self._sends: defaultdict[int, deque[_Sent]] = defaultdict(deque)
        self._num_sent: Counter[int] = Counter()

    @property
    def kept_bytes(self) -> int:
        """Bytes of this rank's messages that may be on their way."""
        return sum(sent.message.nbytes for sends in self._sends.values() for sent in sends)

    def connect(self) -> None:
        """Send one number along each lane, in one order on all ranks. Raises UserError for a pair that cannot."""
        for sender, receiver in self._groups:
            number = torch.ones(1, device=self._device)
            try:
                if self._rank == sender:
                    self._isend(number, receiver).wait()
                elif self._rank == receiver:
                    self.irecv(number, sender).wait()
                    if number.is_cuda:
                        torch.cuda.synchronize()
            except RuntimeError as error:
                raise UserError(
                    f"Rank {sender} cannot send to rank {receiver}, as the plan has it do: "
                    f"{str(error).splitlines()[0].rstrip('.')}."
                ) from error

    def send(self, message: Tensor, receiver: int) -> None:
        """Start to send. The message is kept until it has left, and must not be changed before."""
        sends = self._sends[receiver]
        while sends and sends[0].work.is_completed():
            sends.popleft()
        sends.append(_Sent(self._num_sent[receiver], self._isend(message, receiver), message))
        self._num_sent[receiver] += 1

    def arrived(self, receiver: int, count: int) -> None:
        """The first `count` messages since `wait_for_sends` have arrived, as what the receiver sent shows."""
        sends = self._sends[receiver]
        while sends and sends[0].number < count:
            wait_for(receiver, sends.popleft().work)

    def wait_for_sends(self) -> None:
        """Wait until all messages have left."""
        for receiver, sends in self._sends.items():
            while sends:
                wait_for(receiver, sends.popleft().work)
        self._num_sent.clear()

    def _isend(self, message: Tensor, receiver: int) -> dist.Work:
        work = dist.isend(message, receiver, group=self._groups[self._rank, receiver])
        assert work is not None, "this rank is in the group"
        return work

    def irecv(self, message: Tensor, sender: int) -> dist.Work:
        """Start to receive."""
        work = dist.irecv(message, sender, group=self._groups[sender, self._rank])
        assert work is not None, "this rank is in the group"
        return work


class Inbox:
    """The messages that a rank gets from one sender in a step, POSTED_AHEAD of them at a time.

    num_elements: of each message, in the order of the lane; none is empty.
    """

    def __init__(self, lanes: Lanes, sender: int, num_elements: Iterable[int], like: Tensor) -> None:
        self._lanes, self._sender, self._like = lanes, sender, like
        self._to_post = deque(num_elements)
        self._posted: deque[tuple[dist.Work, Tensor]] = deque()
        for _ in range(POSTED_AHEAD):
            self._post()

    def take(self) -> Tensor:
        """The next message; on CUDA the current stream waits for it, and not the host."""
        work, message = self._posted.popleft()
        self._post()
        wait_for(self._sender, work)
        return message

    def _post(self) -> None:
        if self._to_post:
            message = self._like.new_empty(self._to_post.popleft())
            self._posted.append((self._lanes.irecv(message, self._sender), message))
