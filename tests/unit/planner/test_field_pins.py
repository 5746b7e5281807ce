"""Every field of a Plan has a pin, and a Plan whose every field is pinned is found again, with the same step."""

from dataclasses import fields, replace

import pytest

from motet.core.errors import UserError
from motet.core.plan import Plan, Unit
from motet.core.shapes import connect, language_model, multimodal, vit
from motet.planner.candidate import FieldPins, Pins
from motet.planner.field_pins import fields_of, pinned_plan, pins_of
from motet.planner.module_pins import check_module_pins
from motet.planner.pins import parse_pins, pin_texts
from motet.planner.search import search
from motet.planner.strategies import STRATEGIES
from unit.planner.jobs import ENCODER, LLM, job

OF_THE_JOB = {"model", "cluster", "batch_size", "precision", "policy", "moments"}
OTHERWISE = {
    "units": "fields",
    "stages": "blocks",
    "microbatch_caps": "cap",
    "name": "unit",
}
"""Fields of a Plan and of its units, and the pins that hold them under another name."""


@pytest.fixture(scope="module")
def found():
    planned = job(batch_size=16, spread=0.7)
    return planned, search(planned, STRATEGIES)


def test_every_field_has_a_pin():
    pins = {field.name for each in (Pins, FieldPins) for field in fields(each)}
    decided = {field.name for each in (Plan, Unit) for field in fields(each)} - OF_THE_JOB
    assert {OTHERWISE.get(name, name) for name in decided} <= pins | {"cp", "ep"}


def test_cp_alone_is_the_backbones():
    assert parse_pins(["cp=2"], STRATEGIES) == parse_pins(["backbone.cp=2"], STRATEGIES)
    with pytest.raises(UserError, match=r"backbone\.cp is pinned twice"):
        parse_pins(["cp=2", "backbone.cp=4"], STRATEGIES)
    with pytest.raises(UserError, match="must be a whole number of at least 1"):
        parse_pins(["cp=0"], STRATEGIES)


@pytest.mark.slow
def test_every_plan_of_a_search_is_made_of_its_pins(found):
    planned, result = found
    for one in result.results:
        plan = one.candidate.plan
        pins = pins_of(plan)
        again = pinned_plan(planned, pins)
        assert [(unit.name, unit.stages, unit.num_ranks) for unit in again.units] == [
            (unit.name, unit.stages, unit.num_ranks) for unit in plan.units
        ]
        assert pins_of(again) == pins and list(pins.fields) == list(pins_of(again).fields)
        assert replace(again, units=plan.units) == plan
        assert parse_pins(pin_texts(pins), STRATEGIES) == pins


def test_all_pins_of_each_strategys_leader_give_its_step_exactly(found):
    planned, result = found
    leaders = {one.candidate.strategy: one for one in reversed(result.results)}
    assert len(leaders) >= 4
    for leader in leaders.values():
        pins = parse_pins(pin_texts(pins_of(leader.candidate.plan)), STRATEGIES)
        again = search(planned, STRATEGIES, pins)
        assert [one.prediction.step_s for one in again.results] == [leader.prediction.step_s]
        assert pins_of(again.best.candidate.plan) == pins


@pytest.mark.parametrize(
    "texts",
    [
        ["image.zero=3", "backbone.zero=3"],
        ["strategy=chain", "backbone.recompute=8", "pp=1"],
        ["backbone.cp=2", "backbone.dp=2", "audio.cp=2"],
        ["strategy=bubble-filling", "fills=none"],
        ["schedule=interleaved_1f1b", "deferred_warmup=yes"],
    ],
)
def test_what_is_found_has_the_pinned_fields(texts):
    pins = parse_pins(texts, STRATEGIES)
    result = search(job(batch_size=16), STRATEGIES, pins, is_refined=False)
    assert result.results
    for one in result.results:
        plan = one.candidate.plan
        for name, stated in pins.fields.items():
            assert stated.stated.items() <= fields_of(plan, name).stated.items()
        assert all(plan.unit_of(name).cp == stated.cp for name, stated in pins.modules.items() if stated.cp)
        assert pins.deferred_warmup in (None, plan.deferred_warmup) and pins.fills in (None, plan.fills)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("image.zero=4", "must be 0, 1, 2 or 3"),
        ("image.cap=0", "must be a whole number of at least 1"),
        ("image.blocks=4,x", "whole numbers by stage"),
        ("image.replicated=maybe", "must be one of yes, no"),
        ("image.unit=", "must have a name"),
        ("fills=0-1F0", "RANK:ACTION<BEFORE"),
        ("image.recomputes=1", "did you mean 'recompute'"),
        ("colour=2", "there are strategy, tp, .*, fills, cp; and of a module, as in image.tp, tp, cp, .*, zero, "),
    ],
)
def test_a_field_that_cannot_be_read_is_refused(text, said):
    with pytest.raises(UserError, match=said):
        parse_pins([text], STRATEGIES)


def test_blocks_that_are_not_those_of_the_model_are_refused(found):
    planned, result = found
    pins = pins_of(result.best.candidate.plan)
    stated = replace(pins.fields["image"], blocks=tuple(5 for _ in pins.fields["image"].blocks))
    with pytest.raises(UserError, match="in all"):
        pinned_plan(planned, replace(pins, fields={**pins.fields, "image": stated}))
    with pytest.raises(UserError, match="the model has no module 'video'"):
        check_module_pins(planned, Pins(fields={"video": FieldPins(zero=1)}))


@pytest.mark.parametrize("texts", [["image.cap=9000"], ["image.cap=9000", "audio.cap=9000"], ["backbone.cap=9000"]])
def test_caps_that_no_plan_has_are_refused(texts):
    with pytest.raises(UserError, match="caps are of backbone and of one other module, or under data parallelism of"):
        search(job(batch_size=16), STRATEGIES, parse_pins(texts, STRATEGIES))


@pytest.mark.parametrize("names", [("image", "backbone"), ("image", "audio", "backbone")])
def test_caps_that_are_pinned_hold(names):
    pins = parse_pins([*(f"{name}.cap=9000" for name in names), "microbatch_size=2"], STRATEGIES)
    results = search(job(batch_size=16, spread=0.7), STRATEGIES, pins, is_refined=False).results
    assert results and all(one.candidate.plan.microbatch_caps == dict.fromkeys(names, 9000) for one in results)


def one_unit(*texts):
    """A chain of one pipeline rank on two ranks, every decision pinned but what the texts say."""
    tiny = job(num_nodes=1, batch_size=4)
    unit = ["unit=all", "dp=2"]
    blocks = {"image": 6, "audio": 4, "backbone": 8}
    pins = [f"{name}.{text}" for name, count in blocks.items() for text in (*unit, f"blocks={count}")]
    return pinned_plan(tiny, parse_pins([*pins, "microbatch_size=1", "schedule=1f1b", *texts], STRATEGIES))


def test_what_one_module_says_of_its_unit_is_the_units():
    assert one_unit("backbone.zero=3", "tp=2").units[0].zero == 3
    assert one_unit("backbone.zero=3", "tp=2").units[0].tp == 2
    assert one_unit("recompute=full") is None, "it is searched with all blocks recomputed"


@pytest.mark.parametrize(
    ("texts", "said"),
    [
        (["image.zero=1", "backbone.zero=3"], "backbone has zero = 1, not 3, as is pinned"),
        (["dp=4"], "backbone has dp = 2, not 4, as is pinned"),
        (["tp=2", "backbone.tp=1"], "backbone has tp = 1, not 2, as is pinned"),
        (["image.recompute=6", "recompute=none"], "blocks are recomputed, and not none, as is pinned"),
        (
            ["recompute=full", *(f"{name}.recompute=0" for name in ("image", "audio", "backbone"))],
            "recompute is pinned to 'full', and of each module which blocks are",
        ),
    ],
)
def test_pins_of_one_plan_that_contradict_each_other_are_refused(texts, said):
    with pytest.raises(UserError, match=said):
        one_unit(*texts)


def test_experts_that_ranks_share_are_pinned_by_the_modules_that_have_them():
    mixture = replace(LLM, num_experts=4, experts_per_token=2)
    spec = multimodal("small", language_model(mixture, 2, 4000), [connect(vit("image", ENCODER, 2), 512, "linear")])
    planned = job(spec, num_nodes=1, batch_size=4)
    unit = Unit("all", ({"image": 2, "backbone": 2},), dp=2, ep=2)
    plan = Plan(spec, planned.cluster, (unit,), 4, 1, "1f1b")
    check_module_pins(planned, pins_of(plan))
    assert pinned_plan(planned, pins_of(plan)) == plan


def test_ranks_share_the_sequences_of_a_batch_with_too_few_examples_for_replicas():
    tiny = job(num_nodes=1, batch_size=1)
    chain = {"chain": STRATEGIES["chain"]}
    result = search(tiny, chain, parse_pins(["cp=4"], STRATEGIES), is_refined=False)
    assert result.best.candidate.plan.unit_of("backbone").cp == 4
    assert "CP 4" in result.best.candidate.what


def test_degrees_in_words_are_those_that_are_pinned():
    tiny = job(num_nodes=1, batch_size=4)
    colocated = {"data parallel": STRATEGIES["data parallel"]}
    result = search(tiny, colocated, parse_pins(["backbone.zero=3"], STRATEGIES), is_refined=False)
    assert all("ZeRO 3" in one.candidate.what for one in result.results) and result.results
    lacking = search(tiny, colocated, parse_pins(["deferred_warmup=yes"], STRATEGIES), is_refined=False)
    assert "deferred_warmup is no, not yes, as is pinned." in [ruled.why for ruled in lacking.ruled_out]
