"""Jobs and Plans drawn at random: every kind of pipeline, data parallelism, and encoders wherever they may run."""

from collections import Counter
from itertools import pairwise

from motet.core.cluster import Cluster, Device, Link
from motet.core.plan import Plan, Unit
from motet.core.sampler import Sampler
from motet.core.shapes import Transformer, audio_encoder, connect, language_model, multimodal, vit
from motet.core.workload import BACKBONE
from motet.cost.analytic import Analytic
from motet.planner.degrees import divisors
from motet.planner.job import Job

_NODES = ((1, 2), (1, 3), (1, 4), (2, 2), (1, 6), (2, 3), (2, 4), (4, 2), (8, 1), (1, 5))


def drawn_job(rng):
    """A job of few ranks, blocks and examples, with all the memory that it needs; padded clips among its items."""
    hidden, trained = rng.choice([256, 512, 1024]), rng.choice(["all", "all", "backbone", "projectors"])
    encoder = Transformer(width := rng.choice([128, 256, 512]), 4 * width, 4, window=rng.choice([0, 0, 64]))
    llm = Transformer(hidden, 4 * hidden, 4, rng.choice([2, 4]), gated=rng.random() < 0.5, causal=True)
    makers = rng.choice([("image",), ("audio",), ("image", "audio"), ("image", "audio")])
    make = {"image": vit, "audio": audio_encoder}
    encoders = [make[name](name, encoder, rng.randint(1, 4), trainable=trained == "all") for name in makers]
    generators = [vit("picture", encoder, rng.randint(1, 2))] if rng.random() < 0.15 else []
    is_tied, learns = rng.random() < 0.3, trained != "projectors"
    spec = multimodal(
        "drawn",
        language_model(llm, rng.randint(2, 5), rng.choice([500, 8000]), trainable=learns, tied=is_tied),
        [connect(each, hidden, rng.choice(["linear", "mlp"]), downsample=4) for each in encoders],
        generators,
    )
    names, tasks, spread = [*makers, *(each.name for each in generators)], [], rng.choice([0.0, 0.5, 1.2])
    for number in range(rng.randint(1, 3)):
        lengths = {"median": rng.choice([50, 300, 800]), "spread": spread, "max": 3000}
        text = {**lengths, "median": rng.choice([20, 300, 1000])}
        items = {name: {"length": lengths, "length_per_token": 4} for name in names if not number or rng.random() < 0.7}
        tasks.append({"name": f"task {number}", "text": text, "items": items})
    workload = Sampler.model_validate({"task": tasks}).workload(num_examples=64)
    device = Device("drawn", {"bf16": rng.choice([1e12, 2e13, 4e14])}, 10**12, rng.choice([1e11, 1e12]))
    speeds = [rng.choice([1e9, 5e10, 1e13]) for _ in range(2)]
    latency_s = rng.choice([0.0, 3e-6, 1e-4])
    cluster = Cluster(device, *rng.choice(_NODES), Link(speeds[0], latency_s), Link(speeds[1], 1e-5))
    return Job(spec, cluster, workload, rng.choice([2, 4, 6, 8, 12, 16]), Analytic(cluster), seed=rng.randint(0, 9))


def drawn_plan(rng, job):
    """A Plan of the job, which may not fit it (`check_fit`); None where what was drawn has no ranks."""
    num_blocks, size = job.model.num_blocks, job.batch_size
    encoders = [name for name in num_blocks if name not in (BACKBONE, *job.model.generators)]
    kind, tp = (
        rng.choice(["colocated", "chain", "chain", "apart", "apart", "replicated", "bubbles"]),
        rng.choice([1, 1, 2]),
    )
    if kind == "colocated":
        dp = rng.choice([dp for dp in divisors(size) if dp * tp <= job.cluster.num_ranks] or [1])
        zero = rng.randint(0, 3)
        unit = Unit(
            "all", (num_blocks,), dp=dp, tp=tp, zero=zero, shard_size=rng.choice((0, *divisors(dp))) if zero else 0
        )
        balance = rng.choice(["off", "joint", "per_phase", "auto"])
        return Plan(
            job.model, job.cluster, (unit,), size, rng.choice(divisors(size // dp)), "data_parallel", balance=balance
        )
    elsewhere = {"apart": [name for name in num_blocks if name != BACKBONE], "chain": []}.get(kind, encoders)
    elsewhere = [name for name in elsewhere if kind == "bubbles" or rng.random() < 0.6]
    blocks = [name for name, count in num_blocks.items() if name not in elsewhere for _ in range(count)]
    schedule = rng.choice(["1f1b", "gpipe", "interleaved_1f1b", "zb_h1", "zb_v"])
    chunks = {"interleaved_1f1b": rng.choice([2, 3]), "zb_v": 2}.get(schedule, 1)
    pp, cp, dp = rng.randint(1, 4), rng.choice([1, 1, 1, 2, 3]), rng.choice(divisors(size))
    left = job.cluster.num_ranks - tp * cp * pp * dp
    if left < len(elsewhere) * (kind == "apart") or pp * chunks > len(blocks):
        return None
    stages, replicated = _cut(rng, blocks, pp * chunks), tuple(elsewhere if kind == "replicated" else ())
    units = [Unit("all", stages, 0, dp, pp, tp, cp, replicated, zero=rng.randint(0, 3))]
    for name in elsewhere if kind == "apart" else ():
        degrees = rng.randint(1, left), rng.choice([1, 1, 2]), 1, rng.choice([1, 1, 2, 3])
        units.append(Unit(name, _cut(rng, [name] * num_blocks[name], min(degrees[1], num_blocks[name])),
                          units[-1].ranks.stop, *degrees, zero=rng.randint(0, 3)))  # fmt: skip
    for name in elsewhere if kind == "bubbles" else ():
        own_pp, own_tp = (rng.choice(divisors(number)) for number in (pp, tp))
        own_cp = rng.choice(divisors(tp * cp // own_tp))
        stages = _cut(rng, [name] * num_blocks[name], min(own_pp, num_blocks[name]))
        own_dp = units[0].num_ranks // (own_pp * own_tp * own_cp)
        units.append(Unit(name, stages, 0, own_dp, own_pp, own_tp, own_cp, zero=rng.choice([0, 1])))
    balance = rng.choice(["off", "off", "joint", "per_phase"])
    order = rng.choice(["given", "intra", "inter", "both"]) if balance == "off" else "given"
    capped = (rng.choice(encoders), BACKBONE) if rng.random() < 0.25 else ()
    caps = {name: rng.choice([50, 500, 4000, 20000]) for name in capped}
    return Plan(job.model, job.cluster, tuple(units), size, rng.choice(divisors(size // dp)), schedule,
                balance=balance, order=order, microbatch_caps=caps)  # fmt: skip


def _cut(rng, blocks, num_stages):
    stops = sorted(rng.sample(range(1, len(blocks)), num_stages - 1))
    return tuple(dict(Counter(blocks[start:stop])) for start, stop in pairwise([0, *stops, len(blocks)]))
