"""benchmarks/papers.py keeps what is promised of numbers that others published, and counts every row."""

import json
from collections import Counter
from dataclasses import replace

import numpy as np
import pytest

from benchmark import BENCHMARKS, benchmark


@pytest.fixture(scope="module")
def papers():
    with benchmark("papers") as module:
        yield module


@pytest.fixture(scope="module")
def rows(papers):
    """Those for which nothing is planned."""
    return [row for make in papers.QUICK.values() for row in make()]


@pytest.fixture(scope="module")
def stored():
    return json.loads((BENCHMARKS / "results" / "papers.json").read_text())["rows"]


def test_every_promised_tolerance_is_met(rows):
    assert [f"{row.source}, {row.what}: {row.difference:+.1%}" for row in rows if row.missed] == []


def test_nothing_that_is_promised_has_left_the_table(rows):
    """How many numbers of each table are promised, and how closely."""
    promised = Counter((row.source, row.promised) for row in rows if row.standing == "promised")
    assert promised == {
        ("Cornstarch, Table 3", 0.10): 5,
        ("Optimus, Table 5", 0.01): 1,
        ("Optimus, Table 5", 0.03): 2,
        ("OmniBal, Table 9", 3): 5,
        ("OmniBal, Table 9", 2): 1,
        ("OmniBal, Table 9", 0): 1,
        ("MMScale, Figure 22", 0.02): 3,
        ("Cornstarch, Table 4", 0.03): 9,
    }


def test_what_agrees_by_construction_is_fitted(rows):
    fitted = Counter(row.source for row in rows if row.standing == "fitted")
    assert fitted == {
        "Cornstarch, Table 2": 9,
        "Cornstarch, Table 3": 6,
        "Optimus, Table 1": 1,
        "Optimus, Table 5": 1,
        "Optimus, Table 7": 3,
        "OmniBal, Table 9": 2,
    }


@pytest.mark.parametrize("constant", ["efficiency", "DP bubble"])
def test_a_row_that_finds_a_constant_alone_is_met_exactly(rows, constant):
    found = [row for row in rows if row.fitted.startswith(constant)]
    assert found
    assert {row.difference for row in found} == {0}


def test_coarse_efficiencies_have_the_ratio_of_gpus_whatever_the_constants(papers):
    optimus = papers.papers_optimus
    for constants in (optimus.Constants(0.3, 0.1), optimus.Constants(0.6, 1.0)):
        per_gpu = [optimus._coarse(column, constants) / column.num_gpus for column in optimus.TABLES_5_7]
        assert per_gpu == pytest.approx([per_gpu[0]] * len(per_gpu), rel=1e-6)


def test_the_summary_counts_every_row_once(papers, rows):
    counts = Counter(row.standing for row in rows)
    assert sum(counts.values()) == len(rows)
    line = papers.summary(rows)
    assert line.startswith(f"{len(rows)} rows. {counts['promised']} promised, {counts['promised']} of them met.")
    assert f"{counts['fitted']} fitted" in line and f"{counts['shown']} shown and not promised" in line


def test_a_row_says_what_its_number_is_worth(rows):
    for row in rows:
        assert row.goal.startswith({"promised": "within", "fitted": "fitted", "shown": "shown"}[row.standing])


@pytest.mark.parametrize(("low", "high", "value", "nearest"), [(1, 2, 1.5, 1.5), (1, 2, 3, 2), (1, None, 0.5, 1)])
def test_a_number_in_a_published_range_does_not_differ(papers, rows, low, high, value, nearest):
    with benchmark("published") as published:
        row = replace(rows[0], published=published.Range(low, high), predicted=value)
    assert row.difference == round(value / nearest - 1, 4)


def run(papers, monkeypatch, *words):
    monkeypatch.setattr("sys.argv", ["papers.py", *map(str, words)])
    with pytest.raises(SystemExit) as ended:
        papers.main()
    return ended.value.code


@pytest.mark.parametrize("off", [0.2, -0.2])
def test_a_miss_is_shown_and_exits_with_1(papers, rows, off, monkeypatch, capsys, tmp_path):
    promised = next(row for row in rows if row.standing == "promised" and not isinstance(row.published, tuple))
    wrong = replace(promised, predicted=promised.published * (1 + off))
    monkeypatch.setattr(papers, "QUICK", {promised.source: lambda: [promised, wrong]})
    assert run(papers, monkeypatch, "--quick", "--json", tmp_path / "papers.json") == 1
    assert "2 promised, 1 of them met" in capsys.readouterr().out
    assert [row["met"] for row in json.loads((tmp_path / "papers.json").read_text())["rows"]] == [True, False]


def test_only_the_asked_tables_are_made_and_others_stay_in_the_file(papers, rows, monkeypatch, capsys, tmp_path):
    path, made = tmp_path / "papers.json", []
    for name in ("Cornstarch, Table 3", "Optimus, Table 5"):
        row = replace(rows[0], source=name)
        monkeypatch.setitem(papers.QUICK, name, lambda row=row: made.append(row.source) or [row])
        assert run(papers, monkeypatch, "--quick", "--only", name.lower(), "--json", path) == 0
    assert made == ["Cornstarch, Table 3", "Optimus, Table 5"]
    assert [row["source"] for row in json.loads(path.read_text())["rows"]] == made
    assert run(papers, monkeypatch, "--only", "Table 99") == 2
    assert "no table has Table 99" in capsys.readouterr().err


def test_the_stored_figures_are_those_that_the_program_gives(papers, rows, stored):
    own = {row.source for row in rows}
    made = sorted((row.record() for row in rows), key=lambda row: papers.in_order(row["source"]))
    assert [row for row in stored if row["source"] in own] == json.loads(json.dumps(made))


PLANNED = (
    *(f"Cornstarch, Figure {number}" for number in (9, 10, 13, 14, 15)),
    *("MMScale, Figure 18", "MMScale, Figure 20", "OrchMLLM, Figure 9"),
    *("Optimus, Table 4", "Optimus, Table 6", "Optimus, Table 7, placed", "Optimus, Figure 17"),
)


@pytest.mark.parametrize("source", PLANNED)
def test_the_first_stored_row_of_what_is_planned_is_what_the_program_gives(papers, stored, source):
    first = next(iter(papers.PLANNED[source]()))
    assert json.loads(json.dumps(first.record())) == next(row for row in stored if row["source"] == source)


def test_every_table_is_stored(papers, stored):
    assert {row["source"] for row in stored} == {*papers.QUICK, *papers.PLANNED}
    assert set(papers.PLANNED) == set(PLANNED)
    assert not any(row["missed"] for row in stored)


def test_masks_have_all_tokens_and_lpt_has_the_least_pairs(papers):
    masks = papers.papers_masks
    for mask in ("EP", "EE", "MP"):
        documents = masks.documents(mask, 16384, np.random.default_rng(0))
        assert sum(length for document in documents for _, length in document) == 16384
        found = masks.pairs(mask, 16384)
        assert all((found["lpt"] <= found[method]).all() for method in masks.METHODS)


def test_context_parallelism_is_in_all_units_of_what_cornstarch_runs(papers):
    """VALM-SS with the small LLM: 5 stages of 4 GPUs, beside 7 and 6."""
    found = papers.papers_cornstarch_plans.compared("S", "VALM-SS")
    assert [one.num_ranks for one in found] == [20, 28, 24]
    assert found.gain == min(found.own.over(other) for other in (found.colocated, found.replicated)) > 0


def test_hidden_communication_gains_more_at_a_higher_tp(papers):
    job = papers.papers_mmscale.job_with("MLLM-9B", 12, 128)
    assert 1 < papers.papers_mmscale._exposed(job, 4) < papers.papers_mmscale._exposed(job, 8)


def test_frozen_settings_train_the_named_module_and_all_projectors(papers):
    mmscale = papers.papers_mmscale
    job = mmscale.job_with("MLLM-9B", 12, 128, mmscale._training(("image",)))
    trained = {module.name: {layer.kind for layer in module.layers if layer.trainable} for module in job.model.modules}
    # The query tokens of a generator learn with its projector.
    assert trained["backbone"] == {"queries"} and trained["generated"] == {"projector"}
    assert {"attention", "projector"} <= trained["image"]


def test_both_encoders_of_optimus_read_2048_rows_of_a_sequence_of_2048(papers):
    row, subject = papers.papers_optimus_plans._dual("DualEnc(22B, 5B)")
    batch = subject.job.batch
    assert set(batch.sequence.tolist()) == {2048} and row.num_gpus == subject.job.cluster.num_ranks
    assert {name: set(items.length.tolist()) for name, items in batch.items.items()} == {
        "image": {2048},
        "second": {2048},
    }
    widths = [subject.job.model.module(name).layers[1].output_width for name in ("image", "second")]
    assert widths == [6144, 3072]


def test_only_attention_that_tp_does_not_divide_weighs_more(papers):
    weights = {}
    for pair in papers.papers_omnibal.TABLE_9:
        weights[pair.vit[:3], pair.degrees[0]] = pair.vit_weight
    assert {weight for (vit, _), weight in weights.items() if vit == "EVA"} == {1.0}
    found = [weights["Int", tp] for tp in (1, 2, 4, 8)]
    assert found[0] == 1.0
    assert [(weight - 1) / (tp - 1) for weight, tp in zip(found[1:], (2, 4, 8))] == pytest.approx([found[1] - 1] * 3)
