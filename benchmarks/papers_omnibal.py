"""OmniBal, Table 9: how models are cut into stages, and the GPU-days of 1.2 million samples. Used by papers.py.

A balanced microbatch is 9 images of 1,025 vision tokens and 4,096 tokens of the LLM (section 5.2), and there is one for
every 4.6 samples (Table 3, AVE-BS).

Cuts: `partition` of the forward operations of each layer over the ranks that share it. InternViT's 25 heads divide by
no TP above 1: its attention is taken to be computed whole by each of the TP ranks, and the rest to be shared. That is
not in the paper; nothing is fitted. One weight for InternViT at every TP, 1.5, was found on one of the cuts, and fits
that one better and the others worse.

GPU-days: GPUs times days, as the paper counts (Table 16 has as many on 64 as on 256 GPUs). A step of the published cut,
with the layers recomputed that the table says (of each stage its first ones), is simulated in 1F1B from operations over
A100's 312 TFLOP/s and one efficiency, which is fitted. Steps are of 1,024 samples, which is not given.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import replace
from typing import NamedTuple

import numpy as np
from published import Absent, Row

from motet.core.shapes import Transformer, language_model, vit
from motet.core.spec import Layer, Module
from motet.cost.flops import layer_flops, work_of
from motet.planner import partition
from motet.schedule import one_f_one_b
from motet.simulate import simulate, stage_times

IMAGES, TEXT = np.full(9, 1024), np.array([4096])
NUM_SAMPLES, SAMPLES, BATCH_SIZE = 1.2e6, 4.6, 1024
"""All samples, those of a microbatch, and those of a step."""
PEAK_FLOPS, DAY_S = 312e12, 86_400


def _llm(num_layers: int, vocab_size: int, hidden: int, mlp: int, num_heads: int, num_kv_heads: int) -> Module:
    shape = Transformer(hidden, mlp, num_heads, num_kv_heads, gated=True, norm="rms", causal=True)
    return language_model(shape, num_layers, vocab_size)


def _vit(num_layers: int, hidden: int, mlp: int, num_heads: int) -> Module:
    return vit("image", Transformer(hidden, mlp, num_heads), num_layers, num_positions=1024, class_row=True)


LLMS = {
    "Llama3-8B": _llm(32, 128_256, 4096, 14_336, 32, 8),
    "InternLM2-20B": _llm(48, 92_544, 6144, 16_384, 48, 8),
    "Yi-34B": _llm(60, 64_000, 7168, 20_480, 56, 8),
    "Llama3-70B": _llm(80, 128_256, 8192, 28_672, 64, 8),
    "Qwen1.5-110B": _llm(80, 152_064, 8192, 49_152, 64, 8),
}
VITS = {
    "InternVL-6B": _vit(45, 3200, 12_800, 25),
    "EVA-CLIP-1B": _vit(40, 1408, 6144, 16),
    "EVA-CLIP-4B": _vit(64, 1792, 15_360, 16),
    "EVA-CLIP-8B": _vit(32, 4096, 20_480, 32),
    "EVA-CLIP-18B": _vit(48, 5120, 25_600, 40),
}
INTERNVIT_HEADS, INTERNVIT_MLP_WEIGHTS = 25, 2 * 3200 * 12_800


class Pair(NamedTuple):
    """A row of Table 9.

    degrees:       TP, PP and DP.
    layers:        of each stage. recomputed: how many of them.
    gpu_days:      of the balanced run. baseline_days: without any balance.
    promised:      layers of a stage by which our cut may differ.
    """

    vit: str
    llm: str
    degrees: tuple[int, int, int]
    layers: tuple[int, ...]
    recomputed: tuple[int, ...]
    baseline_days: float
    gpu_days: float
    promised: int | None
    note: str = ""

    @property
    def name(self) -> str:
        return f"{self.vit} + {self.llm}"

    @property
    def vit_weight(self) -> float:
        """What each of the TP ranks computes of a vision layer over its share."""
        tp, _, _ = self.degrees
        layer = next(layer for layer in VITS[self.vit].layers if layer.kind == "attention")
        if self.vit != "InternVL-6B" or INTERNVIT_HEADS % tp == 0:
            return 1.0
        attention = replace(layer, weights=layer.weights - INTERNVIT_MLP_WEIGHTS)
        share = _passes(attention, IMAGES)[0] / _passes(layer, IMAGES)[0]
        return share * tp + 1 - share


FITTED_WEIGHT = 1.5
"""Of InternViT's layers, at every TP: found on the cut of `REFERENCE`."""
QWEN_LAYERS = (21, 22, 13, 13, 14, 14, 14, 14)
QWEN = Pair("InternVL-6B", "Qwen1.5-110B", (8, 8, 1), QWEN_LAYERS, (6, 9, 1, 3, 0, 0, 0, 0), 243, 75.2, 3)
LLAMA_70B_LAYERS = (22, 23, 13, 14, 14, 14, 13, 12)
REFERENCE = Pair("InternVL-6B", "InternLM2-20B", (2, 4, 4), (22, 23, 24, 24), (0, 0, 0, 0), 61.8, 21.3, 3)
MISPRINT = "printed stages are 10 layers short"
TABLE_9 = (
    Pair("InternVL-6B", "Llama3-8B", (1, 4, 8), (16, 17, 20, 24), (8, 7, 10, 24), 27.7, 13.8, 3),
    REFERENCE,
    Pair("InternVL-6B", "Yi-34B", (4, 4, 2), (28, 29, 24, 24), (3, 2, 0, 0), 75.4, 30.5, 3),
    Pair("InternVL-6B", "Llama3-70B", (4, 8, 2), LLAMA_70B_LAYERS, (11, 12, 8, 5, 3, 2, 0, 0), 129, 52.5, 3),
    QWEN,
    Pair("EVA-CLIP-1B", "InternLM2-20B", (2, 4, 4), (43, 16, 15, 14), (0, 0, 0, 0), 23.6, 12.2, None),
    Pair("EVA-CLIP-4B", "InternLM2-20B", (2, 4, 4), (39, 32, 21, 20), (10, 8, 1, 3), 38.1, 17.0, None, MISPRINT),
    Pair("EVA-CLIP-8B", "InternLM2-20B", (2, 4, 4), (17, 18, 23, 22), (5, 5, 8, 10), 41.8, 20.3, 0),
    Pair("EVA-CLIP-18B", "InternLM2-20B", (4, 4, 4), (18, 19, 25, 34), (2, 2, 0, 0), 63.6, 33.8, 2),
)


def _table_9() -> Iterator[Row]:
    source = "OmniBal, Table 9"
    for pair in TABLE_9:
        cut = split(pair, pair.vit_weight)
        note = f"a layer of InternViT weighs {pair.vit_weight:.2f}" if pair.vit_weight > 1 else pair.note
        yield Row(source, f"{pair.name}: cut", "layers", pair.layers, cut, pair.promised, note=note)
    for pair, promised, fitted in ((REFERENCE, 1, "the weight 1.5"), (QWEN, None, "")):
        what = f"{pair.name}: cut at the weight {FITTED_WEIGHT}"
        yield Row(source, what, "layers", pair.layers, split(pair, FITTED_WEIGHT), promised, fitted)
    flops_per_s = _days(REFERENCE, 1.0) / REFERENCE.gpu_days  # With it, REFERENCE takes what is published.
    for pair in TABLE_9:
        fitted = f"efficiency {flops_per_s / PEAK_FLOPS:.1%}" if pair is REFERENCE else ""
        days = _days(pair, flops_per_s)
        yield Row(source, f"{pair.name}: GPU-days", "", pair.gpu_days, days, None, fitted, pair.note)


def _transformer_layers(pair: Pair) -> list[tuple[Layer, np.ndarray]]:
    """The layers that the paper counts, in order, each with what it is given."""
    vision = [(layer, IMAGES) for layer in VITS[pair.vit].layers]
    text = [(layer, TEXT) for layer in LLMS[pair.llm].layers]
    return [entry for entry in vision + text if entry[0].kind == "attention"]


def split(pair: Pair, vit_weight: float) -> tuple[int, ...]:
    """Layers of each stage of the most even cut."""
    flops = [
        _passes(layer, given)[0] * (vit_weight if given is IMAGES else 1.0)
        for layer, given in _transformer_layers(pair)
    ]
    return partition(flops, len(pair.layers))


def _passes(layer: Layer, lengths: np.ndarray) -> list[float]:
    """Operations forward, for the input's gradient, for the weights'."""
    return [float(flops[0]) for flops in layer_flops(layer, work_of(layer, lengths))]


def _days(pair: Pair, flops_per_s: float) -> float:
    """GPU-days of all samples, from a simulated step. They are inversely proportional to flops_per_s, that of a GPU."""
    tp, pp, dp = pair.degrees
    forward, backward = _stage_flops(pair)
    num_microbatches = round(BATCH_SIZE / SAMPLES / dp)
    scale = 1 / (flops_per_s * tp)
    timeline = simulate(one_f_one_b(pp, num_microbatches), stage_times(forward * scale, backward * scale))
    num_steps = NUM_SAMPLES / (SAMPLES * num_microbatches * dp)
    return timeline.makespan_s * num_steps * tp * pp * dp / DAY_S


def _stage_flops(pair: Pair) -> tuple[np.ndarray, np.ndarray]:
    """[num_stages] each: of a microbatch forward, and backward with what is recomputed. The output layer is with the
    last stage."""
    layers = _transformer_layers(pair)
    passes = np.array([_passes(layer, given) for layer, given in layers])
    starts = np.cumsum([0, *pair.layers])
    again = [start + index for start, number in zip(starts, pair.recomputed) for index in range(number)]
    forward, backward = passes[:, 0], passes[:, 1:].sum(axis=1)
    backward[again] += forward[again]
    head = _passes(LLMS[pair.llm].layers[-1], TEXT)
    forward[-1] += head[0]
    backward[-1] += sum(head[1:])
    return np.add.reduceat(forward, starts[:-1]), np.add.reduceat(backward, starts[:-1])


TABLES: Mapping[str, Callable[[], Iterable[Row]]] = {"OmniBal, Table 9": _table_9}
ABSENT = (
    Absent("OmniBal, Tables 1 and 4", "needs GPUs: spreads of forward milliseconds and of memory."),
    Absent("OmniBal, Table 2", "needs GPUs: what models answer after training; GPU-days under ZeRO-3: omnibal.py."),
    Absent("OmniBal, Figure 4", "curves without numbers, over rounds of ISF on other data."),
    Absent("OmniBal, Tables 3, 5 and 7", "are in benchmarks/omnibal.py and groups.py, recompute.py, and planner.py."),
    Absent(
        "OmniBal, Tables 6, 8 and 10 to 16", "of samples whose lengths are not published, on other GPUs and settings."
    ),
)
