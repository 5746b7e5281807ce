"""Cases of settings in recipes for bad_inputs.py, generated from their schemas: every key of `motet train` and `plan`.

A value that the schema takes is accepted, and one that it does not is refused, with a sentence that names the key; what
more than the schema decides stands in the tables below.
"""

from __future__ import annotations

import functools
import math
import random
import re
from collections.abc import Iterator, Mapping
from copy import deepcopy
from itertools import pairwise
from pathlib import Path
from typing import Any

from bad.run import Case, Verdict
from bad.values import HUGE, Key, label, leaves, tried
from motet.data.audio import AudioTransform
from motet.data.images import ImageTransform
from motet.models.families.bounds import BOUNDS
from motet.planning.planned_recipe import PlanRecipe
from motet.train.recipe.recipe import Recipe
from motet.train.recipe.toml_text import dump_toml

NAMES = {"encoders": "image", "costs": "backbone", "peak_tflops": "bf16", "items": "image"}
"""The key to take in each table of free keys."""

TRAIN = ("train", "{shared}/recipe.toml", "--set", "data.heldout=[]", "--set", "run.steps=1")
WITH: Mapping[str, tuple[str, ...]] = {
    "cluster": ('cluster.device="a40"',),
    "balance.costs": ('balance.cost="length"',),
    "data.too_long": ("data.max_sequence_length=4096",),
    "balance.profile": ('balance.cost="profile"',),
    "data.cache_bytes": ('data.cache_folder="copies"',),
}
"""What must be set beside a key of `motet train`, by how it begins."""

SERVICES: Mapping[str, tuple[tuple[str, ...], str]] = {
    "no actors": (('data.service="ray"', "data.num_workers=0"), "num_workers is 0; raise it"),
    "an address without Ray": (('data.ray_address="10.0.0.5:6379"',), "ray_address has no effect without"),
    "a Ray that does not listen": (
        ('data.service="ray"', 'data.ray_address="127.0.0.1:1"', "data.num_workers=1"),
        "(Ray at 127.0.0.1:1 cannot be reached|Ray, which is not installed)",
    ),
    "a URL without a folder of copies": (
        ('data.train=["https://127.0.0.1:1/a.jsonl"]',),
        r"https://127.0.0.1:1/a.jsonl: is a URL.*set data\.cache_folder",
    ),
    "another protocol": (
        ('data.train=["ssh://127.0.0.1/a.jsonl"]', 'data.cache_folder="{folder}/copies"'),
        "URLs of 'ssh://' are not read; those are of s3",
    ),
    "a server that does not listen": (
        ('data.train=["http://127.0.0.1:1/a.jsonl"]', 'data.cache_folder="{folder}/copies"'),
        "http://127.0.0.1:1/a.jsonl cannot be reached, in 5 attempts",
    ),
    "a bound without a folder of copies": (
        ("data.cache_bytes=1000",),
        "cache_bytes has no effect without cache_folder",
    ),
    "checkpoints on the web": (('checkpoint.url="https://127.0.0.1:1/run"',), r"checkpoint\.url"),
}
"""What is wrong with a service, in words: what is set, and what the sentence says."""

JOB: dict[str, Any] = {
    "run": {"batch_size": 4},
    "cluster": {"device": "a40", "nodes": 1, "ranks_per_node": 2},
    "model": {
        "backbone": {"num_layers": 2, "hidden": 64, "mlp": 128, "num_heads": 2, "vocab_size": 100},
        "encoders": {
            "image": {
                "kind": "vit",
                "num_layers": 1,
                "hidden": 32,
                "mlp": 64,
                "num_heads": 2,
                "projector": {"downsample": 4},
            }
        },
    },
    "workload": {
        "task": [
            {
                "name": "images",
                "text": {"median": 20, "spread": 0.5},
                "items": {"image": {"length": {"value": 16}, "count": {"value": 1}, "length_per_token": 4}},
            }
        ]
    },
}
"""A recipe of planning alone, which takes a moment."""

DECIDED: tuple[tuple[str, Verdict], ...] = (
    # Shapes that do not go together, or that no rank has memory for.
    (r"plan/.*(hidden=1|num_heads=4096|num_kv_heads=4096|biases=.*|num_mel_bins=\d+)$", "refuse"),
    (r"plan/.*(hidden=131072|cluster\.memory_gbytes=0\.001)$", "refuse"),
    # One of value, choices and median: the job's own text has a median, its items a value.
    (r"plan/.*(length|count)\.(choices|weights|median)\b", "refuse"),
    (r"plan/.*text\.(choices|weights|value)\b", "refuse"),
    (r"plan/.*(length|count)\.(min|max|spread)=", "refuse"),
    (r"plan/.*\.max=0$", "refuse"),
    # Lengths of billions of tokens fit nowhere, and a task without items has no image for its encoder.
    (r"plan/.*(value|median|min)=4294967296(\.0)?$", "refuse"),
    (r"plan/.*count\.value=0$", "refuse"),
    # Names of files and folders that there are not.
    (r"train/.*data\.(tokenizer|train|heldout)=", "refuse"),
    (r"train/.*model\..*(path|module|args|config|feature_layer)=", "refuse"),
    # Of one family, and not of the others, which have other options; of one source of costs.
    (r"train/.*encoders\.image\.family=(?!\"qwen2_vl\")", "refuse"),
    (r'train/.*balance\.(cost="profile"|profile=|phases=\[)', "refuse"),
    # Images need a reader; a projector's options are those of its kind; callbacks must be there to be called.
    (r'train/.*encoders\.image\.reads="audio"', "refuse"),
    (r'train/.*projector\.(kind="(resampler|qformer)"|queries=(1|1024)$)', "refuse"),
    (r'train/.*(image\.(before|between|after)|model\.merge)="unknown word"$', "refuse"),
    # With one encoder of images, and one manifest, there is nothing to combine or to weigh.
    (r"train/.*(model\.combine=\{|data\.mixture=\[1\])", "refuse"),
    # What the rows of the encoders are, the transforms must give.
    (r"train/.*transforms\.(image\.temporal_patch_size=1|audio\.(sampling_rate=1000|n_fft=16384))$", "accept"),
    # It never clips.
    (r"train/.*optimizer\.clip_norm=(10\*\*30|Infinity)$", "accept"),
    # Devices and precisions that there are not.
    (r"(train|plan)/.*cluster\.(device|peak_tflops)=", "refuse"),
    (r'train/.*data\.(index|cache)_folder=""$', "accept"),
    (r"train/.*transforms\.image\.(patch_size|merge_size|channels|temporal_patch_size|fixed_size)=", "refuse"),
    (r"train/.*transforms\.audio\.(num_mels|n_fft|hop_length|sampling_rate)=", "refuse"),
    (r"train/.*transforms\.image\.max_pixels_side=1$", "refuse"),
    # Parts that do not divide the batch; ranks that there are not; no example left.
    (r"train/.*run\.microbatches=1000000$", "refuse"),
    (r"train/.*run\.batch_size=1$", "accept"),
    (r"train/.*fsdp\.shard_size=1048576$", "refuse"),
    (r"train/.*data\.max_sequence_length=1$", "refuse"),
)
"""What more than the schema decides, by a regular expression of the name; the first that matches."""
UNTRIED = (
    # Right, and planned for longer than a case may take.
    r"plan/.*(num_layers=1024|batch_size=1000000)$",
    # Right, and trained for longer; hundreds of processes; a device that not every machine has.
    r"train/.*run\.(steps=10\*\*9|batch_size=1000000|device=\"cuda\")$",
    r"train/.*data\.num_workers=256$",
    # Relative to the recipe, and so in the folder that cases share.
    r'train/.*(run\.dir|index_folder)="unknown word"$',
)
"""Cases that are left out, by a regular expression of the name."""


def cases(seed: int) -> Iterator[Case]:
    """All cases of settings, the same for a seed."""
    rng = random.Random(f"settings {seed}")
    for case in [*_of_training(rng), *_of_options(rng), *_of_planning(rng), *_of_services()]:
        if not any(re.match(name, case.name) for name in UNTRIED):
            yield case


def _verdict(name: str, is_right: bool, value: Any) -> Verdict:
    right = is_right and value not in (HUGE, "")
    return _decided(name) or ("accept" if right else "refuse")


def _decided(name: str) -> Verdict | None:
    return next((verdict for pattern, verdict in DECIDED if re.match(pattern, name)), None)


def _says(name: str, key: Key) -> str:
    """The sentence names the key, where it is the key alone that is wrong."""
    return "" if _decided(name) else re.escape(next(str(part) for part in reversed(key) if part != 0))


def _training_schema() -> dict[str, Any]:
    """Of a recipe; the bounds of transforms stand in their classes."""
    schema = Recipe.model_json_schema()
    for transform in (ImageTransform, AudioTransform):
        for name, (least, most) in transform._bounds.items():
            node = schema["$defs"][transform.__name__]["properties"][name]
            for option in (node, *node.get("anyOf", ()), node.get("items", {})):
                if option.get("type") in ("integer", "number"):
                    option.update(minimum=least, maximum=most)
    return schema


def _of_training(rng: random.Random) -> Iterator[Case]:
    for leaf in leaves(_training_schema(), NAMES):
        if 0 in leaf.key:
            continue  # Elements of lists: --set sets keys of tables.
        beside = [each for start, sets in WITH.items() if leaf.name.startswith(start) for each in sets]
        for key, value, is_right in tried(leaf, rng):
            yield _training_case("settings", key, value, is_right, beside)


def _of_services() -> Iterator[Case]:
    """What decodes and where files are: keys that say nothing together, and services that do not answer."""
    for what, (sets, says) in SERVICES.items():
        arguments = (*TRAIN, *(word for each in ("run.dir={folder}/run", *sets) for word in ("--set", each)))
        yield Case(f"train/services/{what}", arguments, "refuse", says=says)


def _training_case(group: str, key: Key, value: Any, is_right: bool, beside: list[str]) -> Case:
    dotted = ".".join(map(str, key))
    name = f"train/{group}/{dotted}={label(value)}"
    sets = ["run.dir={folder}/run", *beside, f"{dotted}={_toml(value)}"]
    arguments = (*TRAIN, *(word for each in sets for word in ("--set", each)))
    return Case(name, arguments, _verdict(name, is_right, value), says=_says(name, key))


def _of_options(rng: random.Random) -> Iterator[Case]:
    """Options of HF configs, by their bounds."""
    taken = {
        "backbone": ("num_hidden_layers", "num_attention_heads", "max_position_embeddings", "rms_norm_eps",
                     "initializer_range", "attention_dropout", "vocab_size", "hidden_size", "intermediate_size",
                     "num_key_value_heads", "sliding_window"),
        "encoders.image": ("depth", "embed_dim", "num_heads", "patch_size", "in_channels", "spatial_merge_size",
                           "temporal_patch_size", "mlp_ratio", "initializer_range"),
        "encoders.audio": ("encoder_layers", "encoder_attention_heads", "encoder_ffn_dim", "num_mel_bins",
                           "max_source_positions", "dropout", "init_std", "d_model", "encoder_layerdrop"),
    }  # fmt: skip
    for part, options in taken.items():
        for option in options:
            bound = BOUNDS[option]
            step = 1 if bound.whole else 1e-6
            past = [bound.least - step if not bound.open else bound.least, bound.most + step]
            for value in (*past, *rng.sample((math.nan, -math.inf, HUGE, -1, 10**12, True, "word", [1]), 2)):
                yield _training_case("options", ("model", *part.split("."), "config", option), value, False, [])


def _of_planning(rng: random.Random) -> Iterator[Case]:
    seen = set()
    for leaf in leaves(PlanRecipe.model_json_schema(), NAMES):
        for key, value, is_right in tried(leaf, rng):
            name = f"plan/settings/{'.'.join(map(str, key))}={label(value)}"
            if name not in seen:
                seen.add(name)
                yield planning_case(name, key, value, _verdict(name, is_right, value))


def planning_case(name: str, key: Key, value: Any, verdict: Verdict) -> Case:
    """`motet plan` of JOB with one key set."""
    arguments = ("plan", "{folder}/job.toml", "--out", "{folder}/plan.json")
    return Case(name, arguments, verdict, functools.partial(_write_job, key, value), _says(name, key))


def _write_job(key: Key, value: Any, folder: Path) -> None:
    job = deepcopy(JOB)
    put(job, key, value)
    (folder / "job.toml").write_text(dump_toml(job))


def put(tables: Any, key: Key, value: Any) -> None:
    """Set a key, however deep, in tables and lists of them; what stands above it is made if it is not there."""
    for part, following in pairwise(key):
        if isinstance(part, int):
            tables.extend([{}] * (part + 1 - len(tables)))
            tables = tables[part]
        else:
            tables = tables.setdefault(part, [{}] if following == 0 else {})
    if isinstance(key[-1], int):
        tables[key[-1] :] = [value]
    else:
        tables[key[-1]] = value


def _toml(value: Any) -> str:
    return dump_toml({"value": value}).removeprefix("value = ").strip() if not isinstance(value, dict) else "{ a = 1 }"
