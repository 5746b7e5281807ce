"""A model whose layers all cost the same on a row, for which steps have closed forms."""

import numpy as np

from motet.core.plan import Unit
from motet.core.spec import Attention, Layer, ModelSpec, Module, Stack
from motet.core.workload import BatchLengths, ItemLengths
from motet.simulate.predict.predict import predict
from unit.simulate.jobs import (
    FORWARD_S,
    INPUT_S,
    WEIGHT_S,
    Linear,
    plan,
    workload,
)

LAYER = Layer("attention", 1000, 1000, 10, 50, Attention(10, 10))
EVEN = ModelSpec(
    "even", (Module("image", (Stack(LAYER, 4),)), Module("backbone", (Stack(LAYER, 12),))), (("image", "backbone"),)
)
"""Layers that all cost the same on a row."""
ROWS = 20


class Free(Linear):
    """Messages and the optimizer take no time."""

    def tensor_seconds(self, layer, work, ranks):
        return np.zeros_like(work.rows)

    def send_seconds(self, size_bytes, ranks):
        return np.zeros_like(size_bytes)

    def gather_seconds(self, size_bytes, ranks):
        return 0.0

    all_reduce_seconds = reduce_scatter_seconds = gather_seconds

    def exchange_seconds(self, moved_bytes, ranks):
        return np.zeros_like(moved_bytes.busiest)

    def step_seconds(self, num_parameters, share=1.0):
        return 0.0


def even(num_examples, rows=ROWS):
    """As many rows in the image of each example as in its sequence."""
    each = np.arange(num_examples)
    sequence, num_targets, length, num_tokens = np.full((4, num_examples), rows)
    home = np.zeros(num_examples, np.int32)
    return BatchLengths(sequence, num_targets, home, {"image": ItemLengths(each, length, num_tokens)})


def step(made, batch, cost=Free, **options):
    return predict(made, workload(batch), cost(made.cluster), **options)


def even_plan(*stages, spec=EVEN, recompute=(), **options):
    unit = Unit("all", stages, pp=options.pop("pp", len(stages)), recompute=recompute)
    return plan(unit, spec=spec, batch_size=options.pop("batch_size", 10), **options)


LAYER_F, LAYER_B = ROWS * 1000 * FORWARD_S, ROWS * 1000 * (INPUT_S + WEIGHT_S)
