"""Small models, clusters and plans."""

from motet.core.cluster import Cluster, Device, Link
from motet.core.plan import Plan, Unit
from motet.core.spec import Attention, Layer, ModelSpec, Module, Stack


def layer(trainable=True):
    return Layer(
        "attention", 12, 12, output_width=4, activation_width=8, attention=Attention(4, 4), trainable=trainable
    )


def model(**modules):
    """Modules by name: num_layers, or (num_frozen, num_trained). All feed the backbone, but for a generator, which it
    feeds."""
    made = []
    for name, count in modules.items():
        frozen, trainable = count if isinstance(count, tuple) else (0, count)
        made.append(Module(name, (Stack(layer(False), frozen), Stack(layer(), trainable))))
    edges = [(name, "backbone") for name in modules if name not in ("backbone", "generator")]
    edges += [("backbone", "generator")] if "generator" in modules else []
    return ModelSpec("toy", tuple(made), tuple(edges))


def cluster(num_ranks):
    link = Link(1e9, 0.0)
    return Cluster(Device("toy", {"bf16": 1e12}, 10**9, 1e9), 1, num_ranks, link, link)


def plan(spec, *units, batch_size=16, num_ranks=64, **options):
    return Plan(spec, cluster(num_ranks), units, batch_size, **options)


VLM = model(image=4, audio=(2, 0), backbone=8)
BACKBONE = Unit("llm", ({"backbone": 2},) * 4, pp=4)
PLANS = {
    "chain": plan(VLM, Unit("all", ({"image": 4, "audio": 2}, {"backbone": 3}, {"backbone": 5}), pp=3, dp=2)),
    "chain gpipe": plan(
        VLM, Unit("all", ({"image": 4, "audio": 2}, {"backbone": 8}), pp=2, recompute=({}, {"backbone": 2})),
        schedule="gpipe",
    ),
    "modality parallel": plan(
        VLM,
        Unit("image", ({"image": 1}, {"image": 3}), pp=2),
        Unit("audio", ({"audio": 2},), first_rank=2),
        Unit("llm", ({"backbone": 4}, {"backbone": 4}), first_rank=3, pp=2),
    ),
    "replicated": plan(
        VLM, Unit("llm", ({"backbone": 4}, {"backbone": 4}), pp=2, dp=2, replicated=("image", "audio"), zero=2)
    ),
    "disaggregated": plan(
        model(image=4, audio=(2, 0), backbone=8, generator=2),
        Unit("image", ({"image": 4},), dp=2),
        Unit("audio", ({"audio": 2},), first_rank=2),
        Unit("llm", ({"backbone": 4}, {"backbone": 4}), first_rank=3, dp=3, pp=2, tp=2),
        Unit("generator", ({"generator": 2},), first_rank=15, dp=1),
        batch_size=12,
        microbatch_size=2,
    ),
    "virtual pipeline": plan(
        model(image=4, audio=(2, 0), backbone=8, generator=2),
        Unit("image", ({"image": 4},), dp=2),
        Unit("audio", ({"audio": 2},), first_rank=2),
        Unit("llm", ({"backbone": 2},) * 4, first_rank=3, dp=3, pp=2, tp=2, recompute=({"backbone": 1}, {}, {}, {})),
        Unit("generator", ({"generator": 1}, {"generator": 1}), first_rank=15, pp=2),
        batch_size=24,
        microbatch_size=2,
        schedule="interleaved_1f1b",
    ),
    "fsdp": plan(
        VLM, Unit("all", ({"image": 4, "audio": 2, "backbone": 8},), dp=4, zero=3),
        schedule="data_parallel", balance="per_phase", microbatch_size=2,
    ),
    "interleaved": plan(
        VLM, Unit("all", ({"image": 4, "audio": 2}, *[{"backbone": n} for n in (2, 2, 4)]), pp=2, dp=2),
        schedule="interleaved_1f1b", deferred_warmup=True,
    ),
    "zb_h1": plan(VLM, Unit("all", ({"audio": 2}, {"image": 4}, {"backbone": 8}), pp=3), schedule="zb_h1"),
    "zb_v": plan(VLM, Unit("all", ({"image": 4, "audio": 2}, *[{"backbone": n} for n in (2, 2, 4)]), pp=2),
                 schedule="zb_v"),
    "filled": plan(
        VLM,
        Unit("llm", ({"backbone": 2},) * 4, pp=2, dp=2, tp=2),
        Unit("image", ({"image": 4},), dp=4, tp=2),
        Unit("audio", ({"audio": 1},) * 2, dp=4, pp=2),
        batch_size=8,
        schedule="interleaved_1f1b",
    ),
    "filled and disaggregated": plan(
        model(image=4, backbone=8, generator=2),
        Unit("llm", ({"backbone": 4},) * 2, pp=2, dp=4),
        Unit("image", ({"image": 4},), dp=8),
        Unit("generator", ({"generator": 2},), first_rank=8, dp=2),
    ),
}  # fmt: skip
"""A plan for each way of placing modules."""
