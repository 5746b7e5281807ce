"""SEND and RECV: outputs to the stages that take them in, and gradients of outputs back.

Both ends know the length of a message beforehand (`dispatch/edge_messages.py`), so that receives are posted ahead and
an empty message is not sent. Between two stages of one rank nothing is sent: what is made is taken in at once.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import cache
from typing import NamedTuple

import torch
from torch import Tensor

from motet.dispatch.edge_messages import MessagePart
from motet.runtime.executor import Handler
from motet.runtime.p2p import Inbox, Lanes
from motet.runtime.place import Place
from motet.runtime.tensors import PassKey, StageTensors
from motet.schedule.coordinates import RankLink, Shares
from motet.schedule.program import Action, Kind

_SENDS = (Kind.SEND_F, Kind.SEND_B)
_RECEIVES = (Kind.RECV_F, Kind.RECV_B)
_FORWARD = (Kind.SEND_F, Kind.RECV_F)

Parts = Callable[[int, int, Shares], Sequence[MessagePart]]
"""(number of an edge, microbatch, `RankLink.shares`) -> the parts of its message forward."""


class _Message(NamedTuple):
    """What a SEND or RECV has to do with one rank.

    rank:        of the job, at the other end.
    parts:       what the message carries; of gradients, those parts whose gradient comes back.
    sizes:       elements of each part. A message without elements is not sent.
    num_arrived: of a RECV, how many messages to that rank have arrived when this one is there.
    """

    rank: int
    parts: tuple[MessagePart, ...]
    sizes: tuple[int, ...]
    num_arrived: int = 0


class Messages:
    """The messages of a step on one rank. Making it decides what each SEND and RECV does, and posts the first receives.

    sent_bytes: bytes that this rank has sent so far.
    """

    def __init__(self, place: Place, lanes: Lanes, parts: Parts, tensors: StageTensors, like: Tensor) -> None:
        """like: a tensor of the dtype and on the device of all messages."""
        self._place, self._lanes, self._tensors, self._like = place, lanes, tensors, like
        self._parts = cache(parts)
        self.sent_bytes = 0
        self._messages: dict[Action, list[_Message]] = {}
        self._last_send: dict[tuple[Kind, PassKey], Action] = {}
        # Per rank of the Program, its SENDs so far; per rank of the job, the numbers of those that were not empty.
        num_sent, sent = Counter[int](), defaultdict[int, list[int]](list)
        lengths: dict[int, list[int]] = {}
        for action in place.row.row:
            if action.kind in _SENDS:
                peer = place.program_rank_of(action.peer)
                messages = [self._message(action, link, link.receiver) for link in place.receivers(action)]
                for message in messages:
                    if any(message.sizes):
                        sent[message.rank].append(num_sent[peer])
                num_sent[peer] += 1
                self._messages[action] = messages
                self._last_send[action.kind, (action.stage, action.microbatch)] = action
            elif action.kind in _RECEIVES:
                messages = [self._message(action, link, link.sender) for link in place.senders(action)]
                for number, message in enumerate(messages):
                    if num_elements := sum(message.sizes):
                        lengths.setdefault(message.rank, []).append(num_elements)
                        num_arrived = bisect_left(sent[message.rank], place.answered[action])
                        messages[number] = message._replace(num_arrived=num_arrived)
                self._messages[action] = messages
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

    def made_outputs(self, stage: int, microbatch: int, outputs: Mapping[str, Tensor]) -> None:
        """Keep what a forward pass made for its SENDs, and give it to the stages of this rank that take it in."""
        outputs = {name: output.detach() for name, output in outputs.items()}
        if (Kind.SEND_F, (stage, microbatch)) in self._last_send:
            self._tensors.outputs[stage, microbatch] = outputs
        for sink, edge in self._place.local_edges.get(stage, {}).items():
            parts, action = self._own_parts(edge, microbatch), Action(stage, Kind.F, microbatch)
            self._take_outputs(sink, microbatch, [(part, self._rows_of(part, outputs, action)) for part in parts])

    def made_gradients(self, stage: int, microbatch: int, gradients: dict[str, Tensor]) -> None:
        """Keep what a backward pass made for its SENDs, and give it to the stages of this rank that it comes from."""
        if (Kind.SEND_B, (stage, microbatch)) in self._last_send:
            self._tensors.input_gradients[stage, microbatch] = gradients
        for source, sinks in self._place.local_edges.items():
            if stage in sinks and self._place.stages[source].takes(microbatch):
                parts = self._own_parts(sinks[stage], microbatch)
                pieces = [(part, self._gradient_of(part, gradients)) for part in parts if part.has_gradient]
                own = [(part, piece.clone() if part.rows is None else piece) for part, piece in pieces]
                self._take_gradients(source, microbatch, own)

    def _own_parts(self, edge: int, microbatch: int) -> Sequence[MessagePart]:
        """What goes along an edge between two stages of this rank."""
        return self._parts(edge, microbatch, self._place.own_shares(edge))

    def _send_outputs(self, action: Action) -> None:
        outputs = self._made(action, self._tensors.outputs)
        for message in self._messages[action]:
            self._send(message, [self._rows_of(part, outputs, action) for part in message.parts])

    def _receive_inputs(self, action: Action) -> None:
        for message in self._messages[action]:
            self._take_outputs(action.stage, action.microbatch, self._received(message))

    def _send_gradients(self, action: Action) -> None:
        gradients = self._made(action, self._tensors.input_gradients)
        for message in self._messages[action]:
            self._send(message, [self._gradient_of(part, gradients) for part in message.parts])

    def _receive_gradients(self, action: Action) -> None:
        for message in self._messages[action]:
            self._take_gradients(action.stage, action.microbatch, self._received(message))

    def _rows_of(self, part: MessagePart, outputs: Mapping[str, Tensor], action: Action) -> Tensor:
        """What goes of an output, [num_rows, width], in the type of all messages: autocast, and modules of one's own,
        may make another one, whose bytes the other end would take for its own.
        """
        rows = outputs[part.module].to(self._like.dtype)
        if len(rows) != part.num_sent:
            raise RuntimeError(f"{action} has {len(rows)} rows of {part.module!r}; lengths say {part.num_sent}")
        if rows.shape[1] != part.width:
            raise RuntimeError(f"{action} has rows {rows.shape[1]} wide of {part.module!r}, not {part.width}")
        return rows if part.rows is None else rows[self._index(part.rows.source)]

    def _gradient_of(self, part: MessagePart, gradients: Mapping[str, Tensor]) -> Tensor:
        """What comes back of what went, [num_rows, width]; zeros where the pass made none."""
        gradient = gradients.get(part.module)
        if gradient is None:
            gradient = self._like.new_zeros(part.num_taken, part.width)
        gradient = gradient.to(self._like.dtype)
        return gradient if part.rows is None else gradient[self._index(part.rows.sink)]

    def _take_outputs(self, stage: int, microbatch: int, received: Iterable[tuple[MessagePart, Tensor]]) -> None:
        inputs = self._tensors.inputs.setdefault((stage, microbatch), {})
        for part, rows in received:
            if part.rows is None:
                inputs[part.module] = rows.detach()
            else:
                taken = inputs.setdefault(part.module, self._like.new_zeros(part.num_taken, part.width))
                taken.detach()[self._index(part.rows.sink)] = rows  # A leaf that requires a gradient after the first.
            inputs[part.module].requires_grad_(part.has_gradient)

    def _take_gradients(self, stage: int, microbatch: int, received: Iterable[tuple[MessagePart, Tensor]]) -> None:
        """Add up what arrives. received: parts with rows of their own, which nothing else reads."""
        gradients = self._tensors.output_gradients.setdefault((stage, microbatch), {})
        for part, rows in received:
            if part.rows is None and part.module not in gradients:
                gradients[part.module] = rows
                continue
            if part.module not in gradients:
                gradients[part.module] = self._like.new_zeros(part.num_sent, part.width)
            if part.rows is None:
                gradients[part.module] += rows
            else:
                gradients[part.module].index_add_(0, self._index(part.rows.source), rows)

    def _made(self, action: Action, held: dict[PassKey, dict[str, Tensor]]) -> dict[str, Tensor]:
        """What a pass made; the last SEND of it removes it."""
        key = action.stage, action.microbatch
        return held.pop(key) if self._last_send[action.kind, key] == action else held[key]

    def _send(self, message: _Message, pieces: Sequence[Tensor]) -> None:
        """Send the parts of a message one after the other, if they have any elements."""
        if any(message.sizes):
            elements = (
                pieces[0].detach().contiguous()
                if len(pieces) == 1
                else torch.cat([piece.detach().reshape(-1) for piece in pieces])
            )
            self.sent_bytes += elements.nbytes
            self._lanes.send(elements, message.rank)

    def _received(self, message: _Message) -> list[tuple[MessagePart, Tensor]]:
        """The parts of a message with their rows, [num_rows, width] each."""
        if any(message.sizes):
            elements = self._inboxes[message.rank].take()
            self._lanes.arrived(message.rank, message.num_arrived)
        else:
            elements = self._like.new_empty(0)
        pieces = (elements,) if len(message.parts) == 1 else elements.split(message.sizes)
        return [(part, piece.view(-1, part.width)) for part, piece in zip(message.parts, pieces)]

    def _message(self, action: Action, link: RankLink, rank: int) -> _Message:
        is_from_source = action.kind in (Kind.SEND_F, Kind.RECV_B)
        ends = (action.stage, action.peer) if is_from_source else (action.peer, action.stage)
        every = self._parts(self._place.edges[ends], action.microbatch, link.shares)
        parts = every if action.kind in _FORWARD else tuple([part for part in every if part.has_gradient])
        return _Message(rank, tuple(parts), tuple([part.num_elements for part in parts]))

    def _index(self, rows: object) -> Tensor:
        return torch.as_tensor(rows, device=self._like.device)
