"""What a leader gets beside its degrees: bubbles that are filled by step."""

from dataclasses import replace

import pytest

from motet.core.plan import PROPOSED_BALANCES
from motet.core.plan_file import read_plan, write_plan
from motet.core.shapes import Transformer, connect, language_model, multimodal, vit
from motet.planner import variants
from motet.planner.candidate import Pins, RuledOut, predict_candidate
from motet.planner.order import can_fill_by_step, with_pinned_deal
from motet.planner.pins import parse_pins, pins_in_words
from motet.planner.strategies import STRATEGIES
from motet.planner.variants import fastest_variant
from motet.schedule import validate
from motet.simulate.show.plan_words import plan_in_words
from unit.planner.bubble_filling.test_propose import job, proposals
from unit.planner.jobs import LLM
from unit.planner.jobs import job as small_job

LENGTHS = {"median": 3000, "spread": 1.0, "max": 16000}
IMAGES = {"image": {"count": {"value": 2}, "length": LENGTHS, "length_per_token": 8}}
RAGGED = {
    "task": [
        {"name": "text", "text": {"median": 600, "spread": 1.0, "max": 4096}},
        {"name": "images", "text": {"median": 200, "spread": 0.8, "max": 4096}, "items": IMAGES},
    ]
}
DEGREES = Pins(tp=1, pp=8, microbatch_size=1)


@pytest.fixture(scope="module")
def leader():
    given = job(lengths=RAGGED, num_ranks=8, batch_size=16)
    return given, proposals(given, DEGREES)[0][0]


def test_bubbles_are_filled_by_step_where_that_is_faster(leader, tmp_path):
    given, candidate = leader
    static = predict_candidate(given, candidate)
    found, prediction = fastest_variant(given, candidate, static, Pins(order="given"))
    assert found.plan == replace(candidate.plan, filling="by_step")
    assert prediction.step_s < 0.98 * static.step_s
    assert "Each step fills bubbles by its own lengths: it takes" in found.facts[0]
    assert "Each step decides by its lengths which encoder pipeline takes" in plan_in_words(found.plan)[1]
    # The Plan's pins give its step, and its file the Plan.
    pinned = with_pinned_deal(candidate, Pins(filling="by_step", order="given", balance="off"))
    assert predict_candidate(given, pinned).step_s == prediction.step_s
    write_plan(found.plan, tmp_path / "plan.json")
    assert read_plan(tmp_path / "plan.json") == found.plan
    # What is predicted is what runs.
    assert prediction.program is not None
    validate(prediction.program)


def test_a_pinned_filling_stays(leader):
    given, candidate = leader
    static = predict_candidate(given, candidate)
    assert fastest_variant(given, candidate, static, Pins(order="given", filling="static"))[0].plan.filling == "static"


def test_fills_by_step_are_of_encoders_in_bubbles(leader):
    _, candidate = leader
    pins = parse_pins(["filling=by_step"], [])
    assert pins_in_words(pins) == "filling = by_step"
    chain = replace(candidate, plan=replace(candidate.plan, units=candidate.plan.units[:1], fills=()))
    for plan in (chain.plan, replace(chain.plan, schedule="data_parallel")):
        found = with_pinned_deal(replace(candidate, plan=plan), pins)
        assert isinstance(found, RuledOut)
        assert found.why.startswith("filling is pinned to 'by_step', and ")


def test_sequences_are_cut_over_several_replicas(leader):
    _, candidate = leader
    pins = parse_pins(["balance=split"], [])
    alone = replace(candidate, plan=replace(candidate.plan, order="given"))
    found = with_pinned_deal(alone, pins)
    assert isinstance(found, RuledOut) and "has one; dp must be 2 or more" in found.why


def test_a_plan_that_cuts_sequences_gets_an_order_and_fills_by_step():
    given = job(lengths=RAGGED, num_ranks=16, batch_size=32)
    pins = replace(DEGREES, balance="split")
    candidate = with_pinned_deal(proposals(given, pins)[0][0], pins)
    assert not isinstance(candidate, RuledOut) and can_fill_by_step(candidate.plan)
    static = predict_candidate(given, candidate)
    for own, field, values in (
        (Pins(balance="split", filling="static"), "order", ("intra", "inter", "both")),
        (Pins(balance="split", order="given"), "filling", ("by_step",)),
    ):
        found, prediction = fastest_variant(given, candidate, static, own)
        assert found.plan.balance == "split" and getattr(found.plan, field) in values
        assert prediction.step_s < static.step_s


def test_a_way_of_balancing_that_auto_takes_in_every_microbatch_is_not_simulated_again(monkeypatch):
    image = connect(vit("image", Transformer(512, 2048, 8), 8), 512, "linear", downsample=4)
    given = small_job(multimodal("small", language_model(LLM, 8, 4000), [image]), batch_size=24, spread=1.0)
    proposed = STRATEGIES["data parallel"](given, Pins(dp=8, tp=1, microbatch_size=3))
    candidate = next(one for one in proposed if not isinstance(one, RuledOut))
    assert candidate.plan.balance == "auto" and given.assignment(candidate.plan).methods == ("per_phase",)
    step_s = {
        method: predict_candidate(given, replace(candidate, plan=replace(candidate.plan, balance=method))).step_s
        for method in PROPOSED_BALANCES
    }
    assert step_s["per_phase"] == step_s["auto"] != step_s["joint"]
    simulated = []

    def predicted(job, candidate):
        simulated.append(candidate.plan.balance)
        return predict_candidate(job, candidate)

    monkeypatch.setattr(variants, "predict_candidate", predicted)
    fastest_variant(given, candidate, predict_candidate(given, candidate), Pins())
    assert sorted(simulated) == ["joint", "off"]
