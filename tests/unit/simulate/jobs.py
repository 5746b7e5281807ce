"""A model with a layer of every kind, plans of it for every way of placing modules, lengths, and a cost model whose
answers can be worked out by hand."""

import math
from dataclasses import dataclass, field, replace
from functools import cache

import numpy as np

from motet.assign.context_rows import context_rows
from motet.balance import assign
from motet.core.cluster import Cluster, Device, Link
from motet.core.plan import Plan, Unit
from motet.core.spec import Attention, Layer, ModelSpec, Module
from motet.core.workload import BatchLengths, ItemLengths, Workload
from motet.cost.model import Beyond, LayerSeconds

FORWARD_S, INPUT_S, WEIGHT_S = 1e-6, 2e-6, 5e-6
"""Of a row and a weight."""
TENSOR_S, SEND_S, GATHER_S, REDUCE_S, EXCHANGE_S, STEP_S = 1e-6, 1e-7, 1e-8, 3e-8, 2e-7, 1e-7
"""Of a row and an element; of a byte; of a parameter."""
BIG_FREE = Link(1e15, 0.0)


@dataclass
class Linear:
    """A CostModel: seconds in proportion to rows, bytes, parameters. asked: of each message, what and which ranks.

    call_s: what each end of a message computes for a byte.
    """

    cluster: Cluster
    call_s: float = 0.0
    asked: list = field(default_factory=list)

    def beyond(self, *asked):
        return Beyond()

    def unwrapped(self, *, waits=False):
        return self

    def as_measured(self, model):
        return model

    def entry_seconds(self, module):
        return 0.0

    def layer_seconds(self, module, layer, work, tp=1):
        work_done = work.rows * layer.weights / tp
        return LayerSeconds(work_done * FORWARD_S, work_done * INPUT_S, work_done * WEIGHT_S)

    def tensor_seconds(self, layer, work, ranks):
        return work.rows * layer.output_width * TENSOR_S * (len(ranks) > 1)

    def send_seconds(self, size_bytes, ranks):
        return size_bytes * SEND_S

    def call_seconds(self, size_bytes, ranks):
        return size_bytes * self.call_s

    def gather_seconds(self, size_bytes, ranks):
        self.asked.append(("gather", size_bytes, tuple(ranks)))
        return size_bytes * GATHER_S

    reduce_scatter_seconds = gather_seconds

    def all_reduce_seconds(self, size_bytes, ranks):
        self.asked.append(("all_reduce", size_bytes, tuple(ranks)))
        return size_bytes * REDUCE_S

    def exchange_seconds(self, moved_bytes, ranks):
        self.asked.append(("exchange", moved_bytes.busiest, tuple(ranks)))
        return moved_bytes.busiest * EXCHANGE_S

    def step_seconds(self, num_parameters, share=1.0):
        return num_parameters * STEP_S


def block(width, trainable, divisor=1, causal=False):
    attention = Attention(width, width // 2, causal)
    return Layer("attention", 12 * width, 13 * width, width, 10 * width, attention, divisor, trainable=trainable)


def model(image=True, projector=True, audio=True, backbone=True):
    """What of it learns. Blocks: image 4, audio 3 (padded), backbone 8."""
    images = [
        Layer("patches", 30, 40, 16, 20, trainable=image),
        *[block(16, image)] * 4,
        Layer("projector", 70, 80, 32, 48, divisor=4, trainable=projector),
    ]
    clips = [
        Layer("convolution", 20, 20, 8, 24, divisor=2, trainable=audio),
        *[block(8, audio, divisor=2)] * 3,
        Layer("projector", 50, 60, 32, 40, divisor=8, extra_rows=1, trainable=audio),
    ]
    texts = [
        Layer("embedding", 0, 3200, 32, 0, trainable=backbone),
        *[block(32, backbone, causal=True)] * 8,
        Layer("head", 3200, 3200, 100, 32, trainable=backbone, targets_only=True),
    ]
    modules = Module.of("image", images), Module.of("audio", clips, padded=True), Module.of("backbone", texts)
    return ModelSpec("rich", modules, (("image", "backbone"), ("audio", "backbone")))


MODELS = {
    "all learns": model(),
    "encoders frozen": model(image=False, audio=False),
    "backbone frozen": model(image=False, backbone=False, audio=False),
    "audio frozen": model(audio=False),
    "encoder alone learns": model(backbone=False, audio=False),
    "backbone alone learns": model(image=False, projector=False, audio=False),
}


def cluster(num_ranks=32, link=BIG_FREE):
    return Cluster(Device("test", {"bf16": 1e12, "fp32": 5e11}, 10**9, 1e12), 1, num_ranks, link, link)


def plan(*units, spec=MODELS["all learns"], batch_size=16, **options):
    return Plan(spec, cluster(), units, batch_size, **options)


CHAIN = ({"image": 4}, {"audio": 3, "backbone": 2}, {"backbone": 6})
BACKBONE = ({"backbone": 4},) * 2
WHOLE = {"image": 4, "audio": 3, "backbone": 8}


def colocated(**options):
    unit = Unit("all", (WHOLE,), **{"dp": 4, "zero": 3, **options.pop("unit", {})})
    return plan(unit, schedule="data_parallel", microbatch_size=2, **options)


PLANS = {
    "chain": plan(Unit("all", CHAIN, dp=2, pp=3, recompute=({"image": 2}, {"audio": 3}, {"backbone": 1}))),
    "chain, recomputed": plan(Unit("all", CHAIN, pp=3, tp=2, recompute=CHAIN)),
    "chain of two encoders": plan(
        Unit("all", ({"image": 2}, {"image": 2}, {"audio": 3}, {"backbone": 8}), pp=4, tp=2, cp=2), schedule="gpipe"
    ),
    "interleaved": plan(Unit("all", (*CHAIN[:2], *({"backbone": 3},) * 2), pp=2, dp=2), schedule="interleaved_1f1b"),
    "zb_h1": plan(Unit("all", CHAIN, pp=3, dp=2), schedule="zb_h1"),
    "zb_v": plan(Unit("all", (*CHAIN[:2], *({"backbone": 3},) * 2), pp=2), schedule="zb_v"),
    "modality parallel": plan(
        Unit("image", ({"image": 1}, {"image": 3}), pp=2, tp=2),
        Unit("audio", ({"audio": 3},), first_rank=4),
        Unit("llm", BACKBONE, first_rank=5, pp=2, cp=2),
    ),
    "dp 2 and 1 to 4": plan(
        Unit("image", ({"image": 4},), dp=2),
        Unit("audio", ({"audio": 3},), first_rank=2),
        Unit("llm", BACKBONE, first_rank=3, dp=4, pp=2),
        microbatch_size=2,
    ),
    "dp 2 to 4": plan(
        Unit("image", ({"image": 4},), dp=2),
        Unit("audio", ({"audio": 3},), first_rank=2, dp=4),
        Unit("llm", BACKBONE, first_rank=6, dp=4, pp=2, tp=2),
        microbatch_size=2,
    ),
    "dp 4 to 2": plan(
        Unit("encoders", ({"image": 4}, {"audio": 3}), dp=4, pp=2),
        Unit("llm", BACKBONE, first_rank=8, dp=2, pp=2),
        microbatch_size=4,
    ),
    "replicated": plan(Unit("llm", BACKBONE, pp=2, dp=2, tp=2, replicated=("image", "audio"), zero=2)),
    "in bubbles": plan(
        Unit("llm", ({"backbone": 2},) * 4, pp=2, dp=2, tp=2),
        Unit("image", ({"image": 4},), dp=4, tp=2),
        Unit("audio", ({"audio": 1}, {"audio": 2}), dp=4, pp=2),
        schedule="interleaved_1f1b",
    ),
    "in bubbles of shared sequences": plan(
        Unit("llm", BACKBONE, pp=2, tp=2, cp=2),
        Unit("image", ({"image": 4},), dp=4, cp=2),
        Unit("audio", ({"audio": 1}, {"audio": 2}), dp=2, pp=2, tp=2),
    ),
    "encoders together in bubbles": plan(
        Unit("llm", BACKBONE, pp=2, dp=2), Unit("encoders", ({"image": 4}, {"audio": 3}), dp=2, pp=2)
    ),
    "data parallel": colocated(),
}  # fmt: skip
"""A plan for each way of placing modules."""


def of(spec, made):
    return replace(made, model=spec)


def lengths(num_examples=16, seed=0):
    rng = np.random.default_rng(seed)
    items, sequence = {}, rng.integers(10, 60, num_examples)
    num_targets = sequence // 2
    for name, share, per_token in (("image", 0.8, 4), ("audio", 0.6, 8)):
        example = np.sort(np.concatenate([np.flatnonzero(rng.random(num_examples) < share)] * 2))
        length = rng.integers(8, 100, len(example))
        items[name] = ItemLengths(example, length, -(-length // per_token))
        np.add.at(sequence, example, items[name].num_tokens)
    return BatchLengths(sequence, num_targets, np.zeros(num_examples, np.int32), items)


def alike(num_examples=16, image=16, audio=16, tokens=24):
    """Each example with an image, a clip, and as many tokens."""
    each, ones = np.arange(num_examples), np.ones(num_examples, dtype=np.int64)
    items = {name: ItemLengths(each, length * ones, 4 * ones) for name, length in (("image", image), ("audio", audio))}
    return BatchLengths(tokens * ones, 8 * ones, np.zeros(num_examples, np.int32), items)


def workload(batch):
    return Workload("lengths.csv", batch)


def num_islands(made, stages):
    unit = made.unit_of("backbone")
    return unit.dp // len({stage.replica for stage in stages if "backbone" in stage.modules})


def examples_of(made, stage, island, microbatch, islands):
    """The examples that a stage takes of one microbatch."""
    size = made.unit_of("backbone").dp * made.microbatch_size
    in_island = size // islands
    first = microbatch * size + island * in_island
    return range(first + stage.examples[0], first + stage.examples[1])


def tokens_of(made, batch, module, stage, island, microbatch, islands):
    """Rows that the items of an encoder are in the sequences that a stage takes of one microbatch."""
    examples, items = examples_of(made, stage, island, microbatch, islands), batch.items[module]
    return sum(int(n) for e, n in zip(items.example, items.num_tokens, strict=True) if e in examples)


def items_of(made, batch, module, stage, island, microbatch, islands):
    """Lengths of a module's items in one microbatch of a stage, and targets: by the examples that the stage takes."""
    examples = examples_of(made, stage, island, microbatch, islands)
    if module == "backbone":
        return [int(batch.sequence[e]) for e in examples], sum(int(batch.num_targets[e]) for e in examples)
    items = batch.items[module]
    return [int(n) for e, n in zip(items.example, items.length) if e in examples], 0


def mean_rows_of(made, batch, module, layer, stage, island, microbatch, islands):
    """Rows that the ranks that share the stage's work compute, each on average."""
    found, num_targets = items_of(made, batch, module, stage, island, microbatch, islands)
    shared = len(stage.ranks) // stage.unit.tp
    return (num_targets if layer.targets_only else _rows(made, module, layer, found)) / shared


def rows_of(made, batch, module, layer, stage, island, microbatch, islands):
    """Rows that the busiest of the ranks that share the stage's work computes: items of encoders are whole."""
    cp, num = stage.unit.cp, len(stage.ranks) // stage.unit.tp
    if module == "backbone" or num == 1:
        return mean_rows_of(made, batch, module, layer, stage, island, microbatch, islands)
    found, _ = items_of(made, batch, module, stage, island, microbatch, islands)
    shares = [share for group in _dealt(found, num // cp) for share in _dealt(group, cp)]
    return max(_rows(made, module, layer, share) for share in shares)


def _dealt(lengths, num):
    ranks = assign(np.array(lengths, dtype=np.int64), num).ranks
    return [[length for length, rank in zip(lengths, ranks, strict=True) if rank == c] for c in range(num)]


def _rows(made, module, layer, lengths):
    rows = [math.ceil(length / layer.divisor) + layer.extra_rows for length in lengths]
    return len(rows) * max(rows) if made.model.module(module).padded and rows else sum(rows)


def taken_bytes_of(made, batch, stage, island, microbatch, islands):
    """Bytes of rows of encoders that the first stage of the backbone keeps on the rank that takes in most of each; in
    data parallelism of those that get gradients.
    """
    spec = made.model
    learns = {each.name: any(layer.trainable for layer in each.layers) for each in spec.modules}
    if stage.layers.get("backbone", (1,))[0] or not any(learns.values()):
        return 0
    kept = [name for name in spec.sources("backbone") if learns[name] or made.schedule != "data_parallel"]
    return sum(_most_taken(made, batch, name, stage, island, microbatch, islands) for name in kept) * 32 * 2


def _most_taken(made, batch, name, stage, island, microbatch, islands):
    """Rows that a rank of the backbone's took part in making, or, of another unit's, those that are dealt to it."""
    lengths, _ = items_of(made, batch, name, stage, island, microbatch, islands)
    unit, per_token, cp = made.unit_of(name), {"image": 4, "audio": 8}[name], stage.unit.cp
    if unit.first_rank != stage.unit.first_rank:
        return max(map(sum, _dealt([-(-length // per_token) for length in lengths], cp)))
    num = cp * stage.unit.tp // unit.tp
    shares = [share for group in _dealt(lengths, num // unit.cp) for share in _dealt(group, unit.cp)]
    rows = [sum(-(-length // per_token) for length in share) for share in shares]
    return max(np.array(rows).reshape(cp, -1).sum(axis=1))


def moved_and_copied(made, batch, module, layer, stage, island, microbatch, islands):
    """Bytes that the busiest context-parallel rank gives or gets in a layer's attention, and keeps for backward."""
    cp, tp, attention = stage.unit.cp, stage.unit.tp, layer.attention
    if module != "backbone" or attention is None or cp == 1:
        return 0.0, 0.0
    found, _ = items_of(made, batch, module, stage, island, microbatch, islands)
    of_keys, of_all = _most_moved(tuple(int(length) for length in found), cp)
    heads, kv_heads = attention.num_heads // tp, attention.num_kv_heads // tp
    of_head = 2 * attention.kv_width / tp / max(kv_heads, 1)
    ways = [(of_keys * 2 * max(kv_heads, 1) * of_head,) * 2]
    if heads and heads % cp == 0:
        sent = kv_heads if kv_heads % cp == 0 else heads
        own = sum(found) / cp
        ways.append((of_all * 2 * (heads + sent) * of_head / cp, own * (heads + 2 * (sent - kv_heads)) * of_head))
    return min(ways)


@cache
def _most_moved(lengths, cp):
    """The most rows that a rank gives or gets: of seen keys, and of all; row by row."""
    rows = context_rows(np.array(lengths, dtype=np.int64), cp)
    document = np.repeat(np.arange(len(lengths)), lengths)
    given, got = np.zeros((2, 2, cp))
    for sender in range(cp):
        for receiver in set(range(cp)) - {sender}:
            own = rows.rows[receiver]
            seen = [
                key for key in rows.rows[sender] if any(document[key] == document[row] and key <= row for row in own)
            ]
            for way, count in enumerate((len(seen), len(rows.rows[sender]))):
                given[way, sender] += count
                got[way, receiver] += count
    return np.maximum(given, got).max(axis=1)


def learns_before(spec, name, place):
    """Whether anything that a layer's input comes from learns."""
    own = any(layer.trainable for layer in spec.module(name).layers[:place])
    return own or any(
        learns_before(spec, source, len(spec.module(source).layers)) for source, sink in spec.edges if sink == name
    )


def layers_of(made, stage):
    """(module, layer, learns before it, recomputed) of a stage."""
    for name, (first, stop) in stage.layers.items():
        module = made.model.module(name)
        for number, blocks in enumerate(module.blocks[first:stop]):
            for place in blocks:
                layer, before = module.layers[place], learns_before(made.model, name, place)
                again = number < stage.recomputed.get(name, 0) and layer.attention is not None
                yield name, layer, before, again and (before or layer.trainable)


def kept_a_row(made, stage):
    """(module, layer, has backward, bytes in bf16 of a row that it keeps, and that it would if it were not recomputed).

    Between branches a tensor-parallel rank has a part of the rows; first products get whole ones. So do all layers of
    encoders whose sums are apart.
    """
    tp, begun = stage.unit.tp, set()
    for name, layer, before, again in layers_of(made, stage):
        divided, more = layer.divided_width, 0
        if layer.attention and (name == "backbone" or not stage.has_sums):
            divided = layer.activation_width - 2 * layer.output_width
            has_come = name == "backbone" or stage.layers[name][0] > 0
            more = layer.output_width if has_come and name not in begun else 0
            begun.add(name)
        elif name == "backbone" and layer.kind == "norm":
            divided, more = layer.activation_width, layer.output_width
        saved = layer.activation_width - divided + divided / tp + more * (tp > 1)
        least = min(layer.output_width, layer.activation_width) + more * (tp > 1)
        has_backward = before or layer.trainable
        yield name, layer, has_backward, has_backward * math.ceil(2 * (least if again else saved)), math.ceil(2 * saved)
