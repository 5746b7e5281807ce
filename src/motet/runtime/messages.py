"""SEND and RECV: outputs to the stages that take them in, and gradients of outputs back.

Both ends know the length of a message beforehand (`dispatch/edge_messages.py`), so that receives are posted ahead and
an empty message is not sent.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from functools import cache

import torch
from torch import Tensor

from motet.dispatch.edge_messages import MessagePart
from motet.runtime.executor import Handler
from motet.runtime.p2p import Inbox, Lanes
from motet.runtime.place import Place
from motet.runtime.tensors import PassKey, StageTensors
from motet.schedule.program import Action, Kind

_SENDS = (Kind.SEND_F, Kind.SEND_B)
_RECEIVES = (Kind.RECV_F, Kind.RECV_B)
_FORWARD = (Kind.SEND_F, Kind.RECV_F)

Parts = Callable[[int, int], Sequence[MessagePart]]
"""(number of an edge, microbatch) -> the parts of its message forward."""


class Messages:
    """The messages of a step on one rank. Making it posts the first receives.

    sent_bytes: bytes that this rank has sent so far.
    """

    def __init__(self, place: Place, lanes: Lanes, parts: Parts, tensors: StageTensors, like: Tensor) -> None:
        """like: a tensor of the dtype and on the device of all messages."""
        self._place, self._lanes, self._tensors, self._like = place, lanes, tensors, like
        self._parts = cache(parts)
        self.sent_bytes = 0
        self._num_sends = Counter((a.kind, a.stage, a.microbatch) for a in place.row.row if a.kind in _SENDS)
        lengths: dict[int, list[int]] = {}
        for action in place.row.row:
            if action.kind in _RECEIVES and (num_elements := self._num_elements(action)):
                lengths.setdefault(place.rank_of(action.peer), []).append(num_elements)
        self._inboxes = {sender: Inbox(lanes, sender, counts, like) for sender, counts in lengths.items()}

    @property
    def handlers(self) -> Mapping[Kind, Handler]:
        """The handlers of SEND and RECV."""
        return {
            Kind.SEND_F: self._send_outputs,
            Kind.RECV_F: self._receive_inputs,
            Kind.SEND_B: self._send_gradients,
            Kind.RECV_B: self._receive_gradients,
        }

    def _send_outputs(self, action: Action) -> None:
        outputs = self._sent(action, self._tensors.outputs)
        pieces = []
        for part in self._parts_of(action):
            rows = outputs[part.module]
            if len(rows) != part.num_sent:
                raise RuntimeError(f"{action} has {len(rows)} rows of {part.module!r}; lengths say {part.num_sent}")
            pieces.append(rows if part.rows is None else rows[self._index(part.rows.source)])
        self._send(action, pieces)

    def _receive_inputs(self, action: Action) -> None:
        inputs = self._tensors.inputs.setdefault((action.stage, action.microbatch), {})
        for part, rows in self._received(action):
            if part.rows is None:
                inputs[part.module] = rows
            else:
                taken = inputs.setdefault(part.module, self._like.new_zeros(part.num_taken, part.width))
                taken.detach()[self._index(part.rows.sink)] = rows  # A leaf that requires a gradient after the first.
            inputs[part.module].requires_grad_(part.has_gradient)

    def _send_gradients(self, action: Action) -> None:
        gradients = self._sent(action, self._tensors.input_gradients)
        pieces = []
        for part in self._parts_of(action):
            gradient = gradients.get(part.module)
            if gradient is None:
                gradient = self._like.new_zeros(part.num_taken, part.width)
            pieces.append(gradient if part.rows is None else gradient[self._index(part.rows.sink)])
        self._send(action, pieces)

    def _receive_gradients(self, action: Action) -> None:
        gradients = self._tensors.output_gradients.setdefault((action.stage, action.microbatch), {})
        for part, rows in self._received(action):
            gradient = gradients.setdefault(part.module, self._like.new_zeros(part.num_sent, part.width))
            if part.rows is None:
                gradient += rows
            else:
                gradient.index_add_(0, self._index(part.rows.source), rows)

    def _sent(self, action: Action, held: dict[PassKey, dict[str, Tensor]]) -> dict[str, Tensor]:
        """What a pass made; the last SEND of it removes it."""
        key = action.stage, action.microbatch
        self._num_sends[action.kind, *key] -= 1
        return held[key] if self._num_sends[action.kind, *key] else held.pop(key)

    def is_sent(self, kind: Kind, stage: int, microbatch: int) -> bool:
        """Whether a message of this kind is still to be sent."""
        return self._num_sends[kind, stage, microbatch] > 0

    def _send(self, action: Action, pieces: Sequence[Tensor]) -> None:
        if pieces:
            message = torch.cat([piece.detach().reshape(-1) for piece in pieces])
            self.sent_bytes += message.nbytes
            self._lanes.send(message, self._place.rank_of(action.peer))

    def _received(self, action: Action) -> list[tuple[MessagePart, Tensor]]:
        """The parts of a message with their rows, [num_rows, width] each."""
        parts = self._parts_of(action)
        if not parts:
            return []
        message = self._inboxes[self._place.rank_of(action.peer)].take()
        pieces = message.split([part.num_elements for part in parts])
        return [(part, piece.view(-1, part.width)) for part, piece in zip(parts, pieces, strict=True)]

    def _num_elements(self, action: Action) -> int:
        return sum(part.num_elements for part in self._parts_of(action))

    def _parts_of(self, action: Action) -> list[MessagePart]:
        """The parts of the message of a SEND or RECV; of gradients, those parts whose gradient comes back."""
        is_from_source = action.kind in (Kind.SEND_F, Kind.RECV_B)
        ends = (action.stage, action.peer) if is_from_source else (action.peer, action.stage)
        parts = self._parts(self._place.edges[ends], action.microbatch)
        return [part for part in parts if action.kind in _FORWARD or part.has_gradient]

    def _index(self, rows: object) -> Tensor:
        return torch.as_tensor(rows, device=self._like.device)
