from dataclasses import replace
from io import StringIO

import numpy as np
import pytest
from rich.console import Console

from motet.core.cluster import Cluster, Device, Link
from motet.core.errors import UserError
from motet.core.plan import Fill, Plan, Unit
from motet.core.spec import Attention, Layer, ModelSpec, Module, Stack
from motet.schedule import one_f_one_b
from motet.simulate import simulate, stage_times
from motet.simulate.command import PredictionOutputs, show_predictions
from motet.simulate.predict.prediction import Prediction
from motet.simulate.show.plan_words import plan_in_words, rows_in_words
from motet.simulate.show.report import out_of_memory, print_prediction
from unit.schedule.plans import PLANS

FROZEN = Layer("attention", 10**7, 10**7, 1024, 15000, Attention(1024, 1024), trainable=False)
LAYER = Layer("attention", 2 * 10**8, 2 * 10**8, 4096, 60000, Attention(4096, 1024, causal=True))
SPEC = ModelSpec(
    "small",
    (Module("image", (Stack(FROZEN, 24),)), Module("backbone", (Stack(LAYER, 32),))),
    (("image", "backbone"),),
)
CLUSTER = Cluster(Device("h100", {"bf16": 989e12}, 80 * 10**9, 3.35e12), 4, 8, Link(450e9, 5e-6), Link(50e9, 1e-5))
UNIT = Unit(
    "mllm",
    ({"image": 24, "backbone": 2}, *({"backbone": 10},) * 3),
    dp=4,
    pp=4,
    tp=2,
    recompute=({}, {"backbone": 10}, {"backbone": 4}, {}),
)
PLAN = Plan(SPEC, CLUSTER, (UNIT,), batch_size=64, microbatch_size=2)


@pytest.fixture
def prediction() -> Prediction:
    """1F1B of 4 stages and 8 microbatches: 33 s, of which 24 are busy on every rank."""
    activations = np.full(32, 20 * 10**9)
    activations[5] = 30 * 10**9
    return Prediction(
        timeline=simulate(one_f_one_b(4, 8), stage_times([1.0] * 4, [2.0] * 4)),
        ranks=np.arange(32),
        num_examples=64,
        num_tokens=33 * 32 * 1000,
        model_flops=int(33 * 32 * 989e12 * 0.4),
        hardware_flops=int(33 * 32 * 989e12 * 0.5),
        peak_flops=32 * 989e12,
        memory_bytes={"parameters": np.full(32, 40 * 10**9), "activations": activations},
        capacity_bytes=80 * 10**9,
    )


def test_figures_follow_from_the_facts(prediction):
    assert prediction.step_s == 33.0
    assert prediction.examples_per_s == 64 / 33
    assert prediction.tokens_per_s == 32_000
    assert prediction.mfu == pytest.approx(0.4) and prediction.hfu == pytest.approx(0.5)
    assert prediction.bubbles.total_share == pytest.approx(9 / 33)
    assert prediction.peak_bytes.tolist() == [70 * 10**9 if rank == 5 else 60 * 10**9 for rank in range(32)]


def printed(plan, prediction) -> dict[str, str]:
    """The lines that are printed, by their first words."""
    text = StringIO()
    print_prediction(plan, prediction, Console(file=text, width=200))
    lines = [line.strip() for line in text.getvalue().splitlines() if line.strip()]
    return {line.split("  ")[0]: " ".join(line.split("  ")[1:]).strip() for line in lines}


def test_the_report_has_speed_memory_and_bubbles(prediction):
    lines = {name: rest.split() for name, rest in printed(PLAN, prediction).items()}
    assert lines["step"] == ["33", "s"]
    assert lines["tokens/s"] == ["32,000", "1,000"]
    assert lines["MFU"] == ["40.0%"] and lines["HFU, with recomputation and padding"] == ["50.0%"]
    assert lines["parameters"] == ["40.0", "40.0"]
    assert lines["activations"] == ["20.3", "30.0"]
    assert lines["of 80.0 GB"] == ["75%", "88%"]
    shares = [float(lines[name][0].rstrip("%")) for name in ("PP warm-up", "PP cool-down", "PP other")]
    assert sum(shares) == pytest.approx(100 * 9 / 33, abs=0.2)
    assert lines["all"][:2] == ["27.3%", "9"]
    assert "TP (inside passes)" not in lines
    assert not any(name.startswith("Out of memory") for name in lines)


def test_a_small_models_memory_is_in_megabytes(prediction):
    small = replace(prediction, memory_bytes={part: held // 1000 for part, held in prediction.memory_bytes.items()})
    lines = printed(PLAN, small)
    assert any(name.startswith("Memory of a rank, MB") for name in lines)
    assert lines["parameters"].split() == ["40.0", "40.0"] and lines["of 80.0 GB"].split() == ["0%", "0%"]


def test_a_rank_without_the_memory_is_named(prediction):
    lacking = replace(prediction, capacity_bytes=64 * 10**9)
    said = (
        "Out of memory on 1 of 32 ranks: rank 5, of unit 'mllm', needs 70.0 GB, most of it parameters; "
        "the h100 has 64.0 GB."
    )
    assert out_of_memory(PLAN, lacking) == said
    assert said in printed(PLAN, lacking)
    assert out_of_memory(PLAN, prediction) == ""


def test_one_microbatch_has_no_order():
    made = replace(PLANS["interleaved"], order="both")
    (unit,) = made.units
    one = replace(made, units=(replace(unit, dp=1),), batch_size=4, microbatch_size=4)
    assert "dealt out" in plan_in_words(made)[1]
    assert "dealt out" not in plan_in_words(one)[1]
    assert "whose lengths sum up to at most 9 of llm." in plan_in_words(replace(one, microbatch_caps={"llm": 9}))[1]


def test_a_plan_in_words():
    assert plan_in_words(PLAN) == [
        "small, 6.64 B parameters, of which 6.4 B learn (image frozen), on 4 nodes of 8 h100, in bf16.",
        "A step is 64 examples: 8 microbatches of 2 examples on each of 4 replicas of the backbone; 1F1B.",
        "mllm: ranks 0 to 31 = 4 data x 4 pipeline x 2 tensor, ZeRO-1. 4 stages, in layers: image 24 + backbone 2; "
        "backbone 10 (all recomputed); backbone 10 (4 recomputed); backbone 10.",
    ]


def test_a_plan_of_several_units_in_words():
    units = (
        Unit("vit", ({"image": 24},), first_rank=16),
        Unit("llm", ({"backbone": 8},) * 4, dp=4, pp=2, zero=3, shard_size=2, replicated=("audio",)),
    )
    plan = replace(
        PLAN, units=units, schedule="interleaved_1f1b", deferred_warmup=True, balance="per_phase", batch_size=8,
        fills=(Fill(0, "1F0"),),
    )  # fmt: skip
    assert plan_in_words(plan)[1:] == [
        "A step is 8 examples: 1 microbatch of 2 examples on each of 4 replicas of the backbone; interleaved 1F1B with "
        "deferred warm-up. Whole microbatches are balanced over the backbone's "
        "replicas, and items of encoders over theirs. Encoders run beside the backbone, in 1 slice placed among its "
        "passes.",
        "vit: rank 16. Layers: image 24.",
        "llm: ranks 0 to 7 = 4 data x 2 pipeline, ZeRO-3 over 2 ranks. 4 stages, in layers: 4 x backbone 8. "
        "Every stage also computes audio.",
    ]


def test_ranks_of_a_picture_are_told_in_words():
    def told(plan):
        return rows_in_words(plan).removeprefix("Rows are ranks of the cluster")

    assert told(PLANS["disaggregated"]) == ": image in 0 to 1; audio in 2; llm in 3 to 14; generator in 15."
    assert told(PLANS["filled"]) == ", of the slowest of 2 parts that work alike."
    assert told(PLANS["modality parallel"]) == ": image in 0 to 1; audio in 2; llm in 3 to 4."
    assert told(PLANS["zb_h1"]) == told(PLANS["fsdp"]) == ""


def test_files_are_written_where_asked_for(prediction, tmp_path, capsys):
    outputs = PredictionOutputs(tmp_path / "t.json", tmp_path / "t.html", tmp_path / "t.png")
    show_predictions(PLAN, [prediction], outputs, "small, predicted")
    said = capsys.readouterr().out.replace("\n", "")
    for path in (outputs.trace, outputs.html, outputs.png):
        assert path.stat().st_size > 1000
        assert f"Wrote {path}." in said
    assert "small, predicted" in outputs.html.read_text() and rows_in_words(PLAN) in outputs.html.read_text()
    with pytest.raises(UserError, match="the trace cannot be written to"):
        show_predictions(PLAN, [prediction], PredictionOutputs(trace=tmp_path / "none" / "t.json"), "")
