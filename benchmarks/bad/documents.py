"""Cases of Plans and profiles for bad_inputs.py: every key of the JSON that `motet simulate` reads, set to nonsense."""

from __future__ import annotations

import functools
import json
import random
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from pydantic import TypeAdapter

from bad.run import Case, Verdict
from bad.settings import JOB, put
from bad.values import HUGE, label, leaves, tried
from motet.core.plan import Plan, Unit
from motet.core.shape_tables import ModelShapes
from motet.cost.catalogue import cluster
from motet.cost.profile import (
    LayerTimes,
    MessageTimes,
    ModuleTimes,
    OptimizerTimes,
    Points,
    Profile,
    RunPoints,
    RunTimes,
)
from motet.train.recipe.toml_text import dump_toml

BATCHES = (((1, 8),), ((2, 16),), ((4, 32),))
SIMULATE = ("simulate", "{folder}/plan.json", "--workload", "{folder}/sampler.toml")
WITH_PROFILE = (*SIMULATE, "--profile", "{folder}/profile.json")


def a_plan() -> dict[str, Any]:
    """A Plan of two units on three of four ranks, every key of it spelt out."""
    spec = ModelShapes.model_validate(JOB["model"]).spec("tiny")
    stages = ({"backbone": 1}, {"backbone": 1})
    units = (
        Unit("encoders", ({"image": 1},)),
        Unit("language", stages, first_rank=1, pp=2, recompute=({"backbone": 1}, {"backbone": 0})),
    )
    plan = Plan(spec, cluster("a40", 1, 4), units, batch_size=4, microbatch_caps={})
    return {"motet_plan": 1, **TypeAdapter(Plan).dump_python(plan, mode="json")}


def a_profile() -> dict[str, Any]:
    """Times of every layer of that Plan, of messages and of the optimizer, in proportion to what is computed."""
    spec = ModelShapes.model_validate(JOB["model"]).spec("tiny")
    column = (1e-3, 4e-3, 2e-2)
    modules = []
    for module in spec.modules:
        kinds = {(layer.kind, layer.weights) for layer in module.layers}
        seconds = dict.fromkeys(("forward_s", "input_s", "weight_s", "kept_bytes"), column)
        points = Points(rows=(8, 32, 128), pairs=(64, 512, 4096), **seconds)
        of_runs = RunPoints(**dict.fromkeys(RunPoints.model_fields, column))
        runs = RunTimes(grid=of_runs, held_out=of_runs)
        layers = tuple(
            LayerTimes(kind=kind, weights=weights, grid=points, held_out=points, runs=runs)
            for kind, weights in sorted(kinds)
        )
        modules.append(ModuleTimes(name=module.name, grid=BATCHES, held_out=BATCHES, layers=layers))
    sizes = (1e3, 1e5, 1e7)
    kinds_of_message = ("gather", "reduce_scatter", "all_reduce", "exchange", "send")
    messages = tuple(
        MessageTimes(kind=kind, num_ranks=2, num_nodes=1, size_bytes=sizes, seconds=column)
        for kind in kinds_of_message  # type: ignore[arg-type]
    )
    made = Profile(
        recipe="tiny",
        device="a40",
        precision="bfloat16",
        torch="2",
        measured_at="2026-01-01",
        num_ranks=2,
        modules=tuple(modules),
        messages=messages,
        optimizer=OptimizerTimes(num_parameters=sizes, seconds=column),
    )
    return made.model_dump(mode="json")


def write_plan_file(folder: Path, document: Any = None) -> None:
    """plan.json, and sampler.toml, the lengths to simulate it on."""
    (folder / "plan.json").write_text(json.dumps(a_plan() if document is None else document))
    (folder / "sampler.toml").write_text(dump_toml(JOB["workload"]))


def write_profile_file(folder: Path, document: Any = None) -> None:
    """profile.json."""
    (folder / "profile.json").write_text(json.dumps(a_profile() if document is None else document))


def write_both(folder: Path, profile: Any = None) -> None:
    """The files of a Plan, and a profile to simulate it by."""
    write_plan_file(folder)
    write_profile_file(folder, profile)


def cases(seed: int) -> Iterator[Case]:
    """All cases of Plans and profiles, the same for a seed."""
    rng = random.Random(f"documents {seed}")
    yield Case("simulate/plan/as it is", SIMULATE, "accept", write_plan_file)
    for number, (what, change) in enumerate(_TOGETHER.items()):
        document = a_plan()
        change(document)
        write = functools.partial(write_plan_file, document=document)
        yield Case(f"simulate/plan/{number}: {what}", SIMULATE, "refuse", write)
    names = {"peak_flops": "bf16", "stages": "backbone", "microbatch_caps": "image"}
    yield from _of(a_plan(), TypeAdapter(Plan).json_schema(), "plan", names, SIMULATE, write_plan_file, rng)
    yield Case("simulate/profile/as it is", WITH_PROFILE, "accept", write_both)
    schema = Profile.model_json_schema()
    yield from _of(a_profile(), schema, "profile", {}, WITH_PROFILE, write_both, rng)


def _of(
    document: dict[str, Any],
    schema: dict[str, Any],
    group: str,
    names: Mapping[str, str],
    arguments: tuple[str, ...],
    write: Callable[[Path, Any], None],
    rng: random.Random,
) -> Iterator[Case]:
    seen = set()
    for leaf in leaves(schema, names):
        for key, value, is_right in tried(leaf, rng, 1):
            # Of a module's layers, one with attention.
            key = tuple(1 if part == 0 and above == "stacks" else part for above, part in zip(("", *key), key))
            name = f"simulate/{group}/{'.'.join(map(str, key))}={label(value)}"
            if name in seen:
                continue
            seen.add(name)
            changed = json.loads(json.dumps(document))
            put(changed, key, value)
            is_same = changed == document
            if is_right and value != HUGE and not is_same:
                continue  # Whether a number fits the others is said by hand, where it is tried.
            verdict: Verdict = "accept" if is_right and is_same else "refuse"
            yield Case(name, arguments, verdict, lambda folder, changed=changed: write(folder, changed))


def _unit(number: int, **values: Any) -> Callable[[dict[str, Any]], None]:
    return lambda document: document["units"][number].update(values)


def _top(**values: Any) -> Callable[[dict[str, Any]], None]:
    return lambda document: document.update(values)


def _cluster(**values: Any) -> Callable[[dict[str, Any]], None]:
    return lambda document: document["cluster"].update(values)


def _layers(**values: Any) -> Callable[[dict[str, Any]], None]:
    def change(document: dict[str, Any]) -> None:
        for module in document["model"]["modules"]:
            for stack in module["stacks"]:
                stack["layer"].update(values)

    return change


_TOGETHER: Mapping[str, Callable[[dict[str, Any]], None]] = {
    "ranks beyond the cluster": _unit(1, first_rank=100),
    "ranks beyond the cluster by one": _unit(1, first_rank=3),
    "negative first rank": _unit(0, first_rank=-1),
    "units share a rank": _unit(0, first_rank=2),
    "dp of a billion": _unit(0, dp=10**9),
    "pp of a billion": _unit(1, pp=10**9),
    "tp of a million, on as many ranks": lambda d: (_cluster(num_nodes=10**6)(d), _unit(1, tp=500_000)(d)),
    "dp of a million, on as many ranks": lambda d: (
        _cluster(num_nodes=10**6)(d), _unit(0, dp=10**6)(d), _unit(1, first_rank=10**6)(d), _top(batch_size=10**6)(d)
    ),
    "no units": _top(units=[]),
    "no model": lambda document: document.pop("model"),
    "no modules": lambda document: document["model"].update(modules=[], edges=[]),
    "a million layers": lambda document: document["model"]["modules"][0]["stacks"][0].update(count=10**6),
    "10^5 layers in each of many stacks": lambda document: document["model"]["modules"][0].update(
        stacks=[{**document["model"]["modules"][0]["stacks"][0], "count": 10**5}] * 1000
    ),
    "an edge to itself": lambda document: document["model"].update(edges=[["image", "image"]]),
    "an edge to nowhere": lambda document: document["model"].update(edges=[["image", "x"]]),
    "a stage more": _unit(1, stages=[{"backbone": 1}] * 3),
    "an empty stage": _unit(1, stages=[{}, {"backbone": 2}]),
    "recompute of more than there is": _unit(1, recompute=[{"backbone": 2}, {}]),
    "recompute of an unknown module": _unit(1, recompute=[{"x": 0}, {"y": 1}]),
    "replicated unknown module": _unit(1, replicated=["x"]),
    "shard_size that does not divide": _unit(0, shard_size=3),
    "batch of 10^7 examples": _top(batch_size=10**7),
    "batch of 10^7 examples in microbatches of 100": _top(batch_size=10**7, microbatch_size=100),
    "batch of 10^7 examples in one microbatch": _top(batch_size=10**7, microbatch_size=10**7),
    "microbatch larger than the batch": _top(microbatch_size=8),
    "a fill on an absent rank": _top(fills=[{"rank": 9, "action": "0F0.0", "before": ""}]),
    "a fill of nonsense": _top(fills=[{"rank": 0, "action": "nonsense", "before": ""}]),
    "a cap that no example fits": _top(microbatch_caps={"image": 1}),
    "a cap of an unknown module": _top(microbatch_caps={"x": 10}),
    "an unknown precision": _top(precision="int3"),
    "another version": _top(motet_plan=2),
    "a device that there is not": _cluster(device="h1000"),
    "a model that is no file": _top(model="absent.toml"),
    "layers of 10^17 weights": _layers(weights=10**17, parameters=10**17),
    "rows of 10^17 elements": _layers(output_width=10**17, activation_width=10**17),
    "10^17 rows more": _layers(extra_rows=10**17),
    "a divisor of 10^17": _layers(divisor=10**17, extra_rows=0),
}  # fmt: skip
"""Plans whose numbers are each in bounds, and wrong together; or what no key alone tells."""
