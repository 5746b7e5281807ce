"""SEND and RECV: outputs to the stages that take them in, and gradients of outputs back.

Both ends know the length of a message beforehand (`dispatch/edge_messages.py`), so that receives are posted ahead and
an empty message is not sent. Between two stages of one rank nothing is sent: what is made is taken in at once.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import cache

import torch
from torch import Tensor

from motet.dispatch.edge_messages import MessagePart
from motet.runtime.executor import Handler
from motet.runtime.p2p import Inbox, Lanes
from motet.runtime.place import Place
from motet.runtime.tensors import PassKey, StageTensors
from motet.schedule.coordinates import RankLink
from motet.schedule.program import Action, Kind

_SENDS = (Kind.SEND_F, Kind.SEND_B)
_RECEIVES = (Kind.RECV_F, Kind.RECV_B)
_FORWARD = (Kind.SEND_F, Kind.RECV_F)

Parts = Callable[[int, int, tuple[int, int]], Sequence[MessagePart]]
"""(number of an edge, microbatch, `RankLink.shares`) -> the parts of its message forward."""


class Messages:
    """The messages of a step on one rank. Making it posts the first receives.

    sent_bytes: bytes that this rank has sent so far.
    """

    def __init__(self, place: Place, lanes: Lanes, parts: Parts, tensors: StageTensors, like: Tensor) -> None:
        """like: a tensor of the dtype and on the device of all messages."""
        self._place, self._lanes, self._tensors, self._like = place, lanes, tensors, like
        self._parts, self._own_shares = cache(parts), (place.c, place.c)
        self.sent_bytes = 0
        # Per rank of the Program, its SENDs so far; per rank of the job, the numbers of those that were not empty.
        self._num_sent, self._sent = Counter[int](), defaultdict[int, list[int]](list)
        self._num_sends = Counter((a.kind, a.stage, a.microbatch) for a in place.row.row if a.kind in _SENDS)
        lengths: dict[int, list[int]] = {}
        for action in place.row.row:
            for link in place.senders(action) if action.kind in _RECEIVES else ():
                if num_elements := sum(part.num_elements for part in self._parts_of(action, link)):
                    lengths.setdefault(link.sender, []).append(num_elements)
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
        if self._is_sent(Kind.SEND_F, stage, microbatch):
            self._tensors.outputs[stage, microbatch] = outputs
        for sink, edge in self._place.local_edges.get(stage, {}).items():
            parts = self._parts(edge, microbatch, self._own_shares)
            pieces = self._output_pieces(parts, outputs, Action(stage, Kind.F, microbatch))
            self._take_outputs(sink, microbatch, zip(parts, pieces, strict=True))

    def made_gradients(self, stage: int, microbatch: int, gradients: dict[str, Tensor]) -> None:
        """Keep what a backward pass made for its SENDs, and give it to the stages of this rank that it comes from."""
        if self._is_sent(Kind.SEND_B, stage, microbatch):
            self._tensors.input_gradients[stage, microbatch] = gradients
        for source, sinks in self._place.local_edges.items():
            if stage in sinks and self._place.stages[source].takes(microbatch):
                parts = self._parts(sinks[stage], microbatch, self._own_shares)
                parts = [part for part in parts if part.has_gradient]
                pieces = zip(parts, self._gradient_pieces(parts, gradients), strict=True)
                own = ((part, piece.clone() if part.rows is None else piece) for part, piece in pieces)
                self._take_gradients(source, microbatch, own)

    def _send_outputs(self, action: Action) -> None:
        outputs = self._made(action, self._tensors.outputs)
        self._send(action, lambda parts: self._output_pieces(parts, outputs, action))

    def _receive_inputs(self, action: Action) -> None:
        self._take_outputs(action.stage, action.microbatch, self._received(action))

    def _send_gradients(self, action: Action) -> None:
        gradients = self._made(action, self._tensors.input_gradients)
        self._send(action, lambda parts: self._gradient_pieces(parts, gradients))

    def _receive_gradients(self, action: Action) -> None:
        self._take_gradients(action.stage, action.microbatch, self._received(action))

    def _output_pieces(
        self, parts: Iterable[MessagePart], outputs: Mapping[str, Tensor], action: Action
    ) -> Iterator[Tensor]:
        for part in parts:
            rows = outputs[part.module]
            if len(rows) != part.num_sent:
                raise RuntimeError(f"{action} has {len(rows)} rows of {part.module!r}; lengths say {part.num_sent}")
            if rows.shape[1] != part.width:
                raise RuntimeError(f"{action} has rows {rows.shape[1]} wide of {part.module!r}, not {part.width}")
            yield rows if part.rows is None else rows[self._index(part.rows.source)]

    def _take_outputs(self, stage: int, microbatch: int, received: Iterable[tuple[MessagePart, Tensor]]) -> None:
        inputs = self._tensors.inputs.setdefault((stage, microbatch), {})
        for part, rows in received:
            if part.rows is None:
                inputs[part.module] = rows.detach()
            else:
                taken = inputs.setdefault(part.module, self._like.new_zeros(part.num_taken, part.width))
                taken.detach()[self._index(part.rows.sink)] = rows  # A leaf that requires a gradient after the first.
            inputs[part.module].requires_grad_(part.has_gradient)

    def _gradient_pieces(self, parts: Iterable[MessagePart], gradients: Mapping[str, Tensor]) -> Iterator[Tensor]:
        for part in parts:
            gradient = gradients.get(part.module)
            if gradient is None:
                gradient = self._like.new_zeros(part.num_taken, part.width)
            yield gradient if part.rows is None else gradient[self._index(part.rows.sink)]

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
        self._num_sends[action.kind, *key] -= 1
        return held[key] if self._num_sends[action.kind, *key] else held.pop(key)

    def _is_sent(self, kind: Kind, stage: int, microbatch: int) -> bool:
        """Whether a message of this kind is still to be sent."""
        return self._num_sends[kind, stage, microbatch] > 0

    def _send(self, action: Action, pieces: Callable[[Iterable[MessagePart]], Iterable[Tensor]]) -> None:
        peer = self._place.program_rank_of(action.peer)
        for link in self._place.receivers(action):
            if flat := [piece.detach().reshape(-1) for piece in pieces(self._parts_of(action, link))]:
                message = flat[0] if len(flat) == 1 else torch.cat(flat)
                if message.numel():
                    self.sent_bytes += message.nbytes
                    self._lanes.send(message, link.receiver)
                    self._sent[link.receiver].append(self._num_sent[peer])
        self._num_sent[peer] += 1

    def _received(self, action: Action) -> Iterator[tuple[MessagePart, Tensor]]:
        """The parts of a message with their rows, [num_rows, width] each."""
        for link in self._place.senders(action):
            parts, message = self._parts_of(action, link), self._like.new_empty(0)
            if any(part.num_elements for part in parts):
                message = self._inboxes[link.sender].take()
                self._lanes.arrived(link.sender, bisect_left(self._sent[link.sender], self._place.answered[action]))
            pieces = (message,) if len(parts) == 1 else message.split([part.num_elements for part in parts])
            yield from ((part, piece.view(-1, part.width)) for part, piece in zip(parts, pieces, strict=True))

    def _parts_of(self, action: Action, link: RankLink) -> list[MessagePart]:
        """The parts of the message of a SEND or RECV; of gradients, those parts whose gradient comes back."""
        is_from_source = action.kind in (Kind.SEND_F, Kind.RECV_B)
        ends = (action.stage, action.peer) if is_from_source else (action.peer, action.stage)
        parts = self._parts(self._place.edges[ends], action.microbatch, link.shares)
        return [part for part in parts if action.kind in _FORWARD or part.has_gradient]

    def _index(self, rows: object) -> Tensor:
        return torch.as_tensor(rows, device=self._like.device)
