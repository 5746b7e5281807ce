"""Pins of single modules: every Plan that is found has them, and what no Plan has is one sentence."""

import re
from dataclasses import replace

import pytest

from motet.core.errors import UserError
from motet.core.module_degrees import ModuleDegrees
from motet.planner.candidate import Pins, predict_candidate
from motet.planner.field_pins import pins_of
from motet.planner.infeasible import one_of
from motet.planner.module_pins import degrees_of, unmet_pin
from motet.planner.pins import parse_pins, pins_in_words
from motet.planner.search import search
from motet.planner.search_result import nothing_fits
from motet.planner.strategies import STRATEGIES
from unit.planner.jobs import job

EIGHT = job(batch_size=16)


def found(*texts, **options):
    return search(EIGHT, STRATEGIES, parse_pins(texts, STRATEGIES), **options)


REFINED = ("strategy=chain", "image.dp=4")
"""Refinement, which takes nearly all of a search's time, keeps pins alike: it is tried with pins of these."""


@pytest.mark.parametrize(
    ("pins", "strategies"),
    [
        (["image.pp=1", "backbone.pp=2", "backbone.dp=2", "image.dp=2"], {"modality parallel", "disaggregated"}),
        (["image.pp=2", "audio.pp=1", "image.tp=1", "backbone.tp=1"], {"modality parallel"}),
        (["image.dp=4", "backbone.dp=2"], {"disaggregated"}),
        (["image.dp=8", "audio.pp=1", "backbone.dp=8"], {"data parallel"}),
        (["image.tp=1", "backbone.tp=2"], {"disaggregated"}),
        (["backbone.pp=2", "image.pp=2"], {"bubble filling", "disaggregated"}),
        (["strategy=chain", "backbone.pp=3"], {"chain"}),
    ],
)
def test_every_plan_that_is_found_has_the_pinned_degrees(pins, strategies):
    result = found(*pins, is_refined=pins[0] in REFINED)
    for one in result.results:
        plan = one.candidate.plan
        for text in pins:
            module, _, rest = text.partition(".")
            degree, _, value = rest.partition("=")
            assert text.startswith("strategy") or getattr(degrees_of(plan, module), degree) == int(value)
    assert strategies <= {one.candidate.strategy for one in result.results}


def test_a_single_degree_is_named_alone():
    assert (one_of([1]), one_of([1, 2])) == ("1", "one of 1, 2")


@pytest.mark.parametrize(
    ("pins", "said"),
    [
        (["video.tp=2"], "the model has no module 'video'; it has image, audio, backbone."),
        (["image.cp=2", "image.dp=8"], "image is pinned to cp = 2, dp = 8, 16 ranks, and the cluster has 8."),
        (["image.tp=3"], "image is pinned to tp = 3, and has 4 heads; it must be one of 1, 2, 4"),
        (
            ["backbone.tp=4"],
            "and has 2 heads of keys and values; it must be one of 1, 2, in a node or over whole ones,",
        ),
        (["audio.pp=5"], "audio is pinned to pp = 5; it must be 1 to 4, its blocks."),
        (["image.pp=2", "image.dp=8"], "image is pinned to pp = 2, dp = 8, 16 ranks, and the cluster has 8."),
    ],
)
def test_what_no_plan_has_is_one_sentence(pins, said):
    with pytest.raises(UserError, match=said):
        found(*pins)


def test_ranks_that_share_sequences_by_heads_divide_them():
    """Such a Plan took forever by prediction, so that its picture could not be drawn."""
    by_heads = replace(EIGHT, exchange="ulysses")
    pins = parse_pins(["backbone.cp=3"], STRATEGIES)
    with pytest.raises(UserError, match=r"cp = 3, and context.exchange is 'ulysses': cp must divide its 8 heads, or"):
        search(by_heads, STRATEGIES, pins)
    results = search(by_heads, STRATEGIES, parse_pins(["backbone.cp=4"], STRATEGIES), is_refined=False).results
    assert results and all(one.prediction.step_s < 1e9 for one in results)
    plan = results[0].candidate.plan
    shared = replace(plan.unit_of("backbone"), dp=1, cp=3)
    units = tuple(shared if "backbone" in unit.modules else unit for unit in plan.units)
    with pytest.raises(UserError, match="3 context-parallel ranks do not divide the 8 heads of a rank"):
        predict_candidate(by_heads, replace(results[0].candidate, plan=replace(plan, units=units)))


def test_what_training_cannot_run_is_nearer_than_what_is_not_as_pinned():
    result = found("backbone.cp=4", is_refined=False).with_obstacles(lambda plan: "purple layers", is_trainable=True)
    assert not result.results
    assert re.search(r"Nearest is .*CP 4.*: training cannot run purple layers yet\.$", nothing_fits(result))


def test_a_degree_of_a_plan_that_leaves_ranks_of_a_node_over_can_be_pinned():
    three = job(num_nodes=1, batch_size=4)
    three = three.on(replace(three.cluster, ranks_per_node=3))
    pins = parse_pins(["image.tp=2", "backbone.tp=2"], STRATEGIES)
    best = search(three, STRATEGIES, pins, is_refined=False).best
    assert best.prediction.num_ranks == 2
    again = search(three, STRATEGIES, pins_of(best.candidate.plan))
    assert [one.prediction.step_s for one in again.results] == [best.prediction.step_s]


def test_pins_that_are_possible_only_alone_are_named_where_nothing_fits():
    result = found("image.dp=5", "backbone.dp=4")  # With the audio encoder, ten ranks of eight.
    assert not result.results and "image.dp = 5, backbone.dp = 4" in nothing_fits(result)


def test_replicas_that_divide_neither_examples_nor_each_other_can_be_pinned():
    plan = found("image.dp=5", "backbone.dp=2").best.candidate.plan
    assert (plan.unit_of("image").dp, plan.unit_of("backbone").dp) == (5, 2) and plan.batch_size % 5


def test_strategies_of_one_unit_say_which_pins_differ():
    ruled_out = {one.strategy: one.why for one in found("image.tp=1", "backbone.tp=2").ruled_out}
    assert "TP of backbone is pinned to 2, and another pin says 1" in ruled_out["chain"]
    assert ruled_out["data parallel"] == ruled_out["chain"]


@pytest.mark.parametrize("text", ["image.xp=2", "image.tp=0", "image.tp=two", ".tp=1"])
def test_a_pin_of_a_module_that_cannot_be_read_is_refused(text):
    with pytest.raises(UserError, match=f"^--pin {text}: "):
        found(text)


def test_a_pin_of_the_command_line_outweighs_that_of_the_recipe():
    stated = {"image": ModuleDegrees(tp=1, pp=2), "audio": ModuleDegrees(dp=2)}
    pins = Pins(modules={"image": ModuleDegrees(pp=1)}).beside(stated)
    assert pins_in_words(pins) == "image.tp = 1, image.pp = 1, audio.dp = 2"


def test_a_plan_says_which_pin_it_does_not_have():
    plan = found("strategy=data-parallel").best.candidate.plan
    assert unmet_pin(plan, {"image": ModuleDegrees(pp=1, dp=3)}) == "image has dp = 8, not 3"
    assert not unmet_pin(plan, {"image": ModuleDegrees(pp=1)})


@pytest.mark.parametrize("name", ["modality parallel", "modality-parallel", "modality_parallel"])
def test_a_strategy_may_be_named_without_a_space(name):
    assert parse_pins([f"strategy={name}"], STRATEGIES).strategies == ("modality parallel",)
