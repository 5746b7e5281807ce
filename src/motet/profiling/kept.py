"""Bytes that each layer keeps for backward: of the tensors that autograd saves, each storage once."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from itertools import chain
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from motet.core.arrays import Float64Array
from motet.cost.profile import Batch
from motet.profiling.stopwatch import again, kept_calls
from motet.profiling.subjects import Subject


def kept_once(subject: Subject, batch: Batch) -> Float64Array:
    """Bytes that a forward pass of a batch keeps for backward, float64 [num_layers].

    A storage counts with the layer that is the first to save it: the input of a block with the block; what is saved
    between layers, with the one before. Parameters do not count, nor what a block shares with others, such as
    rotations: a block counts as one that is called with the same again. 0 of an output layer: the memory model has its
    logits apart, as they are not kept. 0 also of a block with layers that are timed as one, which tells none of them.
    """
    kept, running = np.zeros(len(subject.layers)), list[int]()
    held: dict[int, Any] = {}
    tensors = chain(subject.module.parameters(), subject.module.buffers())
    own = {tensor.untyped_storage().data_ptr() for tensor in tensors}

    def pack(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if running and storage.data_ptr() not in own | held.keys():
            held[storage.data_ptr()] = storage  # So that no other tensor gets its place.
            kept[running[-1]] += storage.nbytes()
        return tensor

    in_blocks = [number for number, (layer, _) in enumerate(subject.layers) if layer.in_block]
    # A call of a block runs the layers inside it, too.
    blocks = [module for at in in_blocks if not subject.is_inside(at) for module in subject.layers[at].modules]
    call = subject.prepare(batch, subject.module)
    saved = torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor)
    with _running_layers(subject, running), torch.enable_grad(), saved:
        with kept_calls(blocks) as calls:
            call()
        kept[in_blocks] = 0
        for module in blocks:
            for args, kwargs in calls.get(module, ()):
                once_more, first = again(module, args, kwargs)
                held.pop(first.untyped_storage().data_ptr(), None)  # Each block has an input of its own.
                once_more()
    kept[[layer.targets_only for layer, _ in subject.layers]] = 0
    for block in subject.spec.blocks:
        own = [at for at in block if subject.layers[at].layer.in_block]
        if not all(subject.layers[at].modules for at in own):
            kept[own] = 0
    return kept


@contextmanager
def _running_layers(subject: Subject, running: list[int]) -> Iterator[None]:
    """In the block, `running` has the layers in whose modules a pass is, the innermost last; between layers, the one
    that ran last.
    """
    hooks, depth = [], [0]
    for number, (_, modules) in enumerate(subject.layers):
        for module in modules:
            hooks.append(module.register_forward_pre_hook(partial(_begin, running, depth, number)))
            hooks.append(module.register_forward_hook(partial(_end, running, depth)))
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()


def _begin(running: list[int], depth: list[int], number: int, module: nn.Module, args: object) -> None:
    if not depth[0]:
        running.clear()
    depth[0] += 1
    running.append(number)


def _end(running: list[int], depth: list[int], module: nn.Module, args: object, output: object) -> None:
    depth[0] -= 1
    if depth[0]:
        running.pop()
