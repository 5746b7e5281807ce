"""OmniBal, Tables 7 and 9: nine pairs of models on 32 and 64 A100, and what each of its balances gains. Used by
planner.py.

The lengths of InternVL-Chat-1.2's samples are not published. Here they are sampled so that Table 3 and section 5.2
hold: 1 to 5 tiles, as many in the mean as 9 of a group of 4.6 samples, up to 4,096 tokens and a mean of 890. The
baseline takes four at random, padded to the longest, recomputes all, and is cut into equal parameters (the default of
Megatron-DeepSpeed; the paper does not say how its own is cut). Groups are formed by ISF within 9 tiles and 4,096
tokens, each a packed sequence. A step is of 1,024 samples, which is not given either.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from functools import cache, partial
from math import prod

import numpy as np
from baselines.chains import Cut, chain_plan
from papers_omnibal import LLMS, TABLE_9, VITS, Pair
from trials import Baseline, Case, Subject, with_any_tp

from motet.balance import group
from motet.core.plan import Plan
from motet.core.sampler import Sampler
from motet.core.shapes import connect, multimodal
from motet.core.spec import ModelSpec
from motet.core.workload import BatchLengths, ItemLengths, Workload
from motet.cost.catalogue import cluster
from motet.cost.source import cost_model
from motet.planner.candidate import Pins
from motet.planner.chain import anchored_cut
from motet.planner.degrees import Degrees
from motet.planner.job import Job

BATCH_SIZE, MICROBATCH = 1024, 4
TILES, TOKENS, TILE_LENGTH, TOKENS_OF_TILE = 9, 4096, 1024, 256
NUM_SAMPLES = 1.2e6
DAY_S = 86_400
SAMPLES = Sampler.model_validate(
    {
        "task": [
            {
                "name": "tiles and text",
                "text": {"median": 200, "spread": 1.15, "min": 16, "max": 2816},
                "items": {
                    "image": {
                        "count": {"choices": [1, 3, 4, 5], "weights": [0.67, 0.15, 0.05, 0.13]},
                        "length": {"value": TILE_LENGTH},
                        "length_per_token": TILE_LENGTH / TOKENS_OF_TILE,
                    }
                },
            }
        ]
    }
)


ABLATED = "InternVL-6B + InternLM2-20B"
TABLE_7 = {"no model or memory balance": 51.9, "no memory balance": 29.0}


@cache
def samples() -> Workload:
    return SAMPLES.workload(num_examples=1 << 14)


@cache
def groups() -> tuple[Workload, float]:
    """Full groups, each as one example, and samples in a group in the mean."""
    drawn = samples().examples
    tiles = np.bincount(drawn.items["image"].example, minlength=drawn.num_examples)
    found = group(tiles, drawn.sequence, TILES, TOKENS)
    count = found.num_full
    num_tiles, tokens, targets = (found.totals(values)[:count] for values in (tiles, drawn.sequence, drawn.num_targets))
    num_items = int(num_tiles.sum())
    length = np.full(num_items, TILE_LENGTH)
    images = ItemLengths(np.repeat(np.arange(count), num_tiles), length, np.full(num_items, TOKENS_OF_TILE))
    home = np.zeros(count, dtype=np.int32)
    batch = BatchLengths(tokens, targets, home, {"image": images})
    return Workload("groups of samples", batch), float(found.offsets[count]) / count


def cases() -> Iterator[Case]:
    for pair in TABLE_9:
        name, (tp, pp, dp) = pair.name, pair.degrees
        grouped, size = groups()
        num_groups = round(BATCH_SIZE / size / 8) * 8
        balanced = Subject(_job(pair, grouped, num_groups), size)
        random = Subject(_job(pair, samples(), BATCH_SIZE, padded=True))
        degrees = Pins(("chain",), tp, pp, dp, 1, "1f1b", order="given")
        baselines = [_baseline("random, equal parameters", random, pair, pair.baseline_days)]
        if name == ABLATED:
            steps = zip(TABLE_7.items(), (anchored_cut.by_parameters, None))
            baselines += [_baseline(step, balanced, pair, days, cut) for (step, days), cut in steps]
            baselines.append(
                _baseline("random, equal layers", random, pair, pair.baseline_days, anchored_cut.by_layers)
            )
        yield Case(
            "OmniBal",
            name,
            balanced,
            f"chain, TP {tp}, PP {pp}, DP {dp}, 1F1B",
            partial(balanced.searched, degrees),
            tuple(baselines),
            _step_s(pair.gpu_days, pair, num_groups * size),
            "lengths, on Table 3's means",
        )


def _baseline(
    name: str,
    subject: Subject,
    pair: Pair,
    days: float,
    cut: Cut | None = anchored_cut.by_parameters,
) -> Baseline:
    """In 1F1B with all recomputed. days: published, in GPU-days."""
    job = subject.job
    size = 1 if subject.samples > 1 else MICROBATCH

    def plans() -> Iterator[tuple[str, Plan]]:
        tp, pp, dp = pair.degrees
        degrees = Degrees(tp, pp, dp, size, job.batch_size // (dp * size))
        yield degrees.words, chain_plan(job, degrees, cut, Pins(recompute="full"))

    published_s = _step_s(days, pair, job.batch_size * subject.samples)
    return Baseline(name, partial(subject.fastest, plans), (days / pair.gpu_days,), published_s)


def _step_s(gpu_days: float, pair: Pair, num_samples: float) -> float:
    """Of a step of so many samples, what the GPU-days of the whole dataset come to."""
    return gpu_days * DAY_S * num_samples / (NUM_SAMPLES * prod(pair.degrees))


def _job(pair: Pair, lengths: Workload, batch_size: int, *, padded: bool = False) -> Job:
    devices = cluster("a100-80g", prod(pair.degrees) // 8)
    return with_any_tp(Job(_model(pair, padded), devices, lengths, batch_size, cost_model(devices, "bf16")))


def _model(pair: Pair, padded: bool) -> ModelSpec:
    """padded: sequences are, to the longest of a microbatch."""
    llm = LLMS[pair.llm]
    width = llm.layers[0].output_width
    return multimodal(pair.name, replace(llm, padded=padded), [connect(VITS[pair.vit], width, downsample=4)])
