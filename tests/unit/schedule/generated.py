"""A Program of each kind that the generators and passes make, by name."""

from motet.schedule import (
    Sharding,
    add_communication,
    add_exchanges,
    add_fsdp,
    add_recompute,
    data_parallel,
    gpipe,
    interleaved_1f1b,
    one_f_one_b,
    split_parts,
    zb_h1,
    zb_v,
)
from motet.schedule.generators.bubble_filling import EncoderPipeline, coarse_fills, fill_bubbles, global_order
from motet.schedule.generators.disaggregated import Pipeline, UnitEdge, disaggregated
from motet.schedule.generators.modality_parallel import add_replicas, modality_parallel
from motet.schedule.passes.data_parallel import add_data_parallel


def filled():
    """Two encoder pipelines in the bubbles of an interleaved backbone, in slices."""
    backbone = interleaved_1f1b(2, 2, 4)
    first, second = global_order([2, 2])
    encoders = [EncoderPipeline("image", (0,), first), EncoderPipeline("image", (1,), second)]
    return add_communication(fill_bubbles(backbone, encoders, coarse_fills(backbone, encoders, num_parts=3)))


def sharded(num_ranks, sharding):
    units = {0: (False, False, True), 1: (True,) * 4}
    program = add_exchanges(data_parallel({"image": True, "backbone": True}, num_ranks, 2))
    for stage, own in units.items():
        program = split_parts(program, stage, len(own), len(own))
    return add_fsdp(program, units, sharding)


GENERATED = {
    "gpipe": gpipe(3, 4, has_backward=[False, True, True]),
    "1f1b": one_f_one_b(4, 6),
    "1f1b, sends, recomputation": add_recompute(add_communication(one_f_one_b(4, 6)), [0, 2]),
    "interleaved": interleaved_1f1b(2, 3, 4),
    "zb_h1": zb_h1(3, 5),
    "zb_v, sends": add_communication(zb_v(3, 6)),
    "modality parallel": add_communication(modality_parallel({"image": 2, "audio": 1}, 3, 5)),
    "encoders replicated": add_replicas(one_f_one_b(3, 4), {"image": True, "audio": True}),
    "disaggregated": add_communication(
        disaggregated([Pipeline(("image",), 3), Pipeline(("backbone",) * 2, 2)], [UnitEdge(0, 1)], 4)
    ),
    "filled": filled(),
    "data parallel, nothing learns": data_parallel({"image": False, "backbone": False}, 2, 2),
    "sharded": sharded(4, Sharding()),
    "sharded in replicas": sharded(4, Sharding(2)),
    "not sharded": sharded(2, Sharding(1)),
} | {
    f"ZeRO {zero}": add_data_parallel(interleaved_1f1b(2, 2, 4), dict.fromkeys(range(4), zero), range(1, 4))
    for zero in range(4)
}
