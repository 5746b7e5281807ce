"""Operations of the forward pass alone: those of a module in which nothing is trainable."""

from dataclasses import replace

from motet.core.spec import Module
from motet.cost.flops import step_flops


def forward_flops(module, lengths, num_targets=None, *, microbatch=None):
    frozen = Module.of(module.name, [replace(layer, trainable=False) for layer in module.layers], module.padded)
    return step_flops(frozen, lengths, num_targets, microbatch=microbatch)
