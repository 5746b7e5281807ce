"""Measurements that need several ranks: messages between them, and layers that they share by tensor parallelism."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, cast

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.tensor import Replicate
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    RowwiseParallel,
    parallelize_module,
)

from motet.core.arrays import Float64Array
from motet.cost.profile import LayerTimes, MessageKind, MessageTimes, unshared
from motet.cost.profiled import message_fit
from motet.models.block import Block
from motet.models.families.shaped_layer import ShapedLayer
from motet.profiling.measure import BOTH, FORWARD, INPUT, WEIGHTS, MeasuredSubject
from motet.profiling.stopwatch import Stopwatch, kept_calls, time_passes
from motet.runtime.p2p import Inbox, Lanes
from motet.train.world import World

_SIZES_BYTES = {"cpu": tuple(2**n for n in range(12, 25, 2)), "cuda": tuple(2**n for n in range(12, 29, 2))}
_NUM_LINKS = 4
"""Messages of a chain."""
_REPEATS = 7
"""Chains, of which the median counts."""
_NUM_PRODUCTS, _WIDTH = 8, {"cpu": 256, "cuda": 2048}
"""Matrix products between two messages, and their size: a millisecond or two, as a layer takes."""
_NUM_TENSORS = 8
"""Parameters of a layer, about."""
_ROUNDS = 9
"""Rounds over all batches, of which the medians count."""
_COLUMNS = frozenset({"q_proj", "k_proj", "v_proj", "gate_proj", "up_proj", "fc1"})
_ROWS = frozenset({"o_proj", "out_proj", "down_proj", "fc2"})
"""The linear layers that are cut by columns of their weights, and by rows."""


def measure_messages(world: World, watch: Stopwatch) -> list[MessageTimes]:
    """What a message of each kind and size, among all ranks, adds to ranks that compute. A collective.

    Seconds of a chain of computations with a message after each, minus those of the chain without messages. Messages
    without computation between them would cost less than in a step, where ranks do not arrive at the same moment and
    threads must wake. The median of several chains counts, on the slowest rank.
    """
    device = "cuda" if world.device.type == "cuda" else "cpu"
    square = torch.zeros(_WIDTH[device], _WIDTH[device], device=world.device)
    alone_s = _chain_s(world, watch, square, lambda: None)
    times = []
    for kind, prepare in _MESSAGES.items():
        seconds = []
        for size_bytes in _SIZES_BYTES[device]:
            added_s = _chain_s(world, watch, square, prepare(size_bytes // 4, world)) - alone_s
            seconds.append(max(added_s / _MESSAGES_A_CALL.get(kind, 1), 0.0))
        times.append(
            MessageTimes(
                kind=kind,
                num_ranks=world.num_ranks,
                num_nodes=world.num_nodes,
                size_bytes=_SIZES_BYTES[device],
                seconds=tuple(seconds),
            )
        )
    if device == "cpu":
        calls_s = tuple([_call_s(size_bytes // 4, world) for size_bytes in _SIZES_BYTES[device]])
        times.append(
            MessageTimes(
                kind="call",
                num_ranks=world.num_ranks,
                num_nodes=world.num_nodes,
                size_bytes=_SIZES_BYTES[device],
                seconds=calls_s,
            )
        )
    return times


def _call_s(count: int, world: World) -> float:
    """Seconds of the processor that a message of `count` elements between the first rank and the last takes of the
    thread that computes, in the mean of both ends: to start it, and to take it out when it is there. A collective.
    """
    ends, watch = (0, world.num_ranks - 1), Stopwatch(world.device, waits=False)
    lanes = Lanes([ends, ends[::-1]], world.rank, world.device)
    taken: list[float] = []
    if world.rank in ends:
        peer, message = ends[world.rank == 0], torch.zeros(count, device=world.device)
        inbox = Inbox(lanes, peer, [count] * (_REPEATS + 1), message)
        calls: list[Callable[[], object]] = [partial(lanes.send, message, peer), inbox.take]
        for _ in range(_REPEATS + 1):
            taken.append(sum(watch(call)[0] for call in (calls if world.rank == 0 else reversed(calls))))
        lanes.wait_for_sends()
    of_ends = world.gather(float(np.median(taken[1:])) if taken else 0.0)
    return (of_ends[ends[0]] + of_ends[ends[1]]) / 4


def _chain_s(world: World, watch: Stopwatch, square: Tensor, send: Callable[[], object]) -> float:
    """Seconds of one link of a chain, on the slowest rank. send: what is run after the products of a link."""

    def chain() -> None:
        for _ in range(_NUM_LINKS):
            for _ in range(_NUM_PRODUCTS):
                torch.mm(square, square)
            send()

    samples = []
    for _ in range(_REPEATS + 1):
        world.barrier()
        samples.append(watch(chain)[0])
    # The first chain opens connections.
    return max(world.gather(float(np.median(samples[1:])))) / _NUM_LINKS


class _Layer(nn.Module):
    """Parameters that FSDP gathers together, as those of a layer."""

    def __init__(self, count: int, device: torch.device) -> None:
        super().__init__()
        each = max(count // _NUM_TENSORS, 1)
        self.tensors = nn.ParameterList(torch.zeros(each, device=device) for _ in range(_NUM_TENSORS))

    def forward(self) -> None:
        """FSDP makes its groups in the first call."""


def _gather(count: int, world: World) -> Callable[[], object]:
    """FSDP's gathering of parameters, with its copies before and after, which take as long as the message."""
    layer = _Layer(count, world.device)
    fully_shard(layer, mesh=init_device_mesh(world.device.type, (world.num_ranks,)))
    sharded = cast(FSDPModule, layer)
    layer()

    def gather() -> None:
        sharded.unshard()
        sharded.reshard()

    return gather


def _reduce_scatter(count: int, world: World) -> Callable[[], object]:
    """FSDP's reduce-scatter of gradients, with its copy of what it sends."""
    each = -(-count // _NUM_TENSORS // world.num_ranks) * world.num_ranks
    gradients = [torch.zeros(each, device=world.device) for _ in range(_NUM_TENSORS)]
    part = torch.zeros(each * _NUM_TENSORS // world.num_ranks, device=world.device)

    def reduce_scatter() -> None:
        chunks = [gradient.view(world.num_ranks, -1) for gradient in gradients]
        dist.reduce_scatter_single(part, torch.cat(chunks, dim=1).view(-1))

    return reduce_scatter


def _all_reduce(count: int, world: World) -> Callable[[], object]:
    whole = torch.zeros(count, device=world.device)
    return lambda: dist.all_reduce(whole)


def _exchange(count: int, world: World) -> Callable[[], object]:
    """An all-to-all in which each rank sends `count` elements, in equal parts to the others."""
    part = count // (world.num_ranks - 1)
    splits = [0 if rank == world.rank else part for rank in range(world.num_ranks)]
    sent, received = (torch.zeros(sum(splits), device=world.device) for _ in range(2))
    return lambda: dist.all_to_all_single(received, sent, splits, splits)


def _send(count: int, world: World) -> Callable[[], object]:
    """A message from the first rank to the last, which are the farthest apart, and back."""
    whole, last = torch.zeros(count, device=world.device), world.num_ranks - 1

    def send() -> None:
        if world.rank == 0:
            dist.send(whole, last)
            dist.recv(whole, last)
        elif world.rank == last:
            dist.recv(whole, 0)
            dist.send(whole, 0)

    return send


_MESSAGES: dict[MessageKind, Callable[[int, World], Callable[[], object]]] = {
    "gather": _gather,
    "reduce_scatter": _reduce_scatter,
    "all_reduce": _all_reduce,
    "exchange": _exchange,
    "send": _send,
}
"""The functions that make a call that sends so many float32 elements, by kind of message."""
_MESSAGES_A_CALL = {"send": 2}


def measure_shared(
    measured: MeasuredSubject, watch: Stopwatch, world: World, messages: Sequence[MessageTimes]
) -> tuple[list[LayerTimes], list[str]]:
    """A rank's share of the module's transformer layers, with tensor parallelism over all ranks; or a sentence why it
    cannot be measured.

    Layers run as torch shards them, with two all-reduces of activations in each pass. Their seconds, which
    `measure_messages` has measured, are subtracted, because a cost model counts them apart. A collective.
    """
    subject = measured.subject
    times: list[LayerTimes] = []
    for number, (layer, modules) in enumerate(subject.layers):
        module = next(iter(modules), None)
        if layer.attention is None or not isinstance(module, Block):
            continue
        reason = "some of its layers attend to rows of images" if subject.spec.key_blocks else ""
        if reason := reason or _obstacle(module):
            return [], [unshared(subject.name, reason)]
        if reason := _remainder(module, layer.attention.kv_width, layer.attention.width, world.num_ranks):
            return [], [unshared(subject.name, reason, world.num_ranks)]
        shared = _shared(module, world)
        samples = [
            [_shared_once(measured, index, module, shared, watch) for index in range(len(measured.batches))]
            for _ in range(_ROUNDS + 1)
        ][1:]
        seconds = np.median(np.stack(world.gather(np.median(np.array(samples), axis=0))), axis=0)
        points = measured.points(number, _without_all_reduces(seconds, measured, number, messages))
        times.append(
            LayerTimes(
                kind=layer.kind,
                weights=layer.weights,
                reach=layer.attention.reach,
                tp=world.num_ranks,
                grid=points[0],
                held_out=points[1],
            )
        )
    return times, []


def _obstacle(block: Block) -> str:
    """Why a block cannot be shared here by any number of ranks; "" if it can by some."""
    if isinstance(block.inner, ShapedLayer):
        return "its layers are made from sizes alone, of which it is not known how to share them"
    names = {name.rpartition(".")[2] for name, child in block.inner.named_modules() if isinstance(child, nn.Linear)}
    if unknown := sorted(names - _COLUMNS - _ROWS - {""}):
        return f"its layers have {', '.join(unknown)}, of which it is not known how to share them"
    if not hasattr(block.inner, "self_attn"):
        return "its layers have no self_attn, without which it is not known how to share them"
    head_dim = block.inner.self_attn.head_dim
    for name, child in block.inner.self_attn.named_children():
        if not isinstance(child, nn.Linear) and getattr(child, "weight", torch.empty(0)).numel() > head_dim:
            return f"its {name} is of all heads together, and ranks have some of them"
    return ""


def _remainder(block: Block, kv_width: int, width: int, num_ranks: int) -> str:
    """Why a block cannot be shared by so many ranks; "" if it can."""
    head_dim = block.inner.self_attn.head_dim
    for what, count in (("heads", width // head_dim), ("key-value heads", kv_width // head_dim)):
        if count % num_ranks:
            return f"its layers have {count} {what}, which is no multiple"
    return ""


def _shared(block: Block, world: World) -> nn.Module:
    """A copy of the layer, shared by all ranks (Shoeybi et al. 2019, section 3): columns first, then rows."""
    inner = copy.deepcopy(block.inner)
    if hasattr(inner.self_attn, "num_heads"):
        # Some families read it, others take it from the width of the product.
        inner.self_attn.num_heads //= world.num_ranks
    mesh = init_device_mesh(world.device.type, (world.num_ranks,))
    whole = Replicate()
    plan: dict[str, Any] = {
        # The gradient of an input that several products read is then summed once, not once for each of them.
        "self_attn": PrepareModuleInput(
            input_kwarg_layouts={"hidden_states": whole}, desired_input_kwarg_layouts={"hidden_states": whole}
        )
    }
    if hasattr(inner, "mlp"):
        plan["mlp"] = PrepareModuleInput(input_layouts=(whole,), desired_input_layouts=(whole,))
    for name, child in inner.named_modules():
        last = name.rpartition(".")[2]
        if isinstance(child, nn.Linear):
            plan[name] = ColwiseParallel() if last in _COLUMNS else RowwiseParallel()
    return parallelize_module(inner, mesh, plan)


def _shared_once(
    measured: MeasuredSubject, index: int, block: Block, shared: nn.Module, watch: Stopwatch
) -> Float64Array:
    """Seconds [3] of a block's share on a batch."""
    torch.manual_seed(index)  # All ranks compute on the same rows.
    subject = measured.subject
    with kept_calls([block]) as calls, torch.no_grad():
        subject.prepare(measured.batches[index], subject.module)()
    seconds = np.zeros(3)
    for args, kwargs in calls[block]:
        hidden = args[0].detach().requires_grad_()

        def call(hidden: Tensor = hidden, rest: tuple[Any, ...] = args[1:], named: dict[str, Any] = kwargs) -> Tensor:
            return shared(hidden, *rest, **named)

        seconds += time_passes(watch, call, [hidden], list(shared.parameters()))
    return seconds


def _without_all_reduces(
    seconds: Float64Array, measured: MeasuredSubject, number: int, messages: Sequence[MessageTimes]
) -> Float64Array:
    """Seconds [num_batches, 3] without the two all-reduces of a pass, and with backward for the weights by itself."""
    layer = measured.subject.layers[number].layer
    line = message_fit(*(times for times in messages if times.kind == "all_reduce"))
    element_bytes = next(measured.subject.module.parameters()).element_size()
    grid, held_out = measured.points(number, seconds)
    size_bytes = np.array(grid.rows + held_out.rows) * layer.output_width * element_bytes
    all_reduces_s = 2 * line.seconds(size_bytes)
    without = seconds.copy()
    without[:, WEIGHTS] = np.maximum(seconds[:, BOTH] - seconds[:, INPUT], 0)
    for column in (FORWARD, INPUT):
        without[:, column] = np.maximum(seconds[:, column] - all_reduces_s, 0)
    return without
