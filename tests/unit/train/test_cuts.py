"""Encoders that a Plan cuts where they cannot be cut: one sentence, before anything is built."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from motet.core.errors import UserError
from motet.core.plan import Plan, Unit
from motet.cost.catalogue import cluster
from motet.models.families.siglip import SiglipEncoder
from motet.models.mllm import MLLM
from motet.models.module import ModalityModule
from motet.models.projector import ProjectorConfig, build_projector
from motet.models.spec import model_spec
from motet.schedule import coarse_fills, fillable, parse_action
from motet.train.planned_job import ChosenPlan, impossible_cut
from parity.planned import DIM, build_hf_model
from parity.planned_parts import Tiles
from parity.tiny import QFORMER, Halves, ToyEncoder
from parity.towers import NUM_KEYS

LLM = {"backbone": 3}


class Whole(SiglipEncoder):
    """A tower whose layers run whole."""

    @property
    def halves(self):
        raise AttributeError


class Undescribed(ToyEncoder):
    """An encoder in parts, of whose blocks `layers` says nothing."""

    enter = through = leave = None


def doubled(rows, sizes):
    return torch.cat([rows, rows], dim=1)


doubled.output_dim = 16


def encoder_of(tower, *, queries=True, **callbacks):
    width = getattr(callbacks.get("between"), "output_dim", 8)
    config = ProjectorConfig(kind="qformer", queries=3, config=QFORMER) if queries else ProjectorConfig()
    return ModalityModule(tower, build_projector(width, DIM, config), **callbacks)


def said_of(tower="image", stages=({"it": 2}, {"it": 2, **LLM}), recompute=(), **options):
    hf = build_hf_model(parts=("queries",))
    tower = hf.encoders[tower].encoder if isinstance(tower, str) else tower
    model = MLLM({"it": encoder_of(tower, **options)}, hf.backbone)
    unit = Unit("all", stages, pp=len(stages), zero=0, recompute=recompute)
    return impossible_cut(model, Plan(model_spec(model), cluster("h100", 1, 2), (unit,), 2))


BEFORE_QUERIES = {"it": 3}, {"it": 1, **LLM}


def test_encoders_of_the_families_can_be_cut_anywhere():
    assert not said_of() and not said_of(stages=BEFORE_QUERIES) and not said_of(before=Tiles(12))
    assert not said_of(between=Halves()) and not said_of(between=doubled)
    assert not said_of("audio", ({"it": 2}, {"it": 1, **LLM}))


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (
            {"stages": BEFORE_QUERIES, "between": Halves()},
            "unit 'all' cuts 'it' before its projector, which cannot be: its callback `between` changes the number of",
        ),
        ({"stages": BEFORE_QUERIES, "between": doubled}, "its callback `between` changes the width of rows"),
        (
            {"tower": "audio", "stages": ({"it": 1}, {"it": 2, **LLM}), "before": Tiles(5)},
            "unit 'all' cuts 'it' into 2 stages, which cannot be cut between its blocks: WhisperEncoder pads what",
        ),
        (
            {"tower": ToyEncoder(4, "packed"), "stages": ({"it": 1, **LLM},), "recompute": ({"it": 1},)},
            "recomputes blocks of 'it', which cannot be cut between its blocks: ToyEncoder has no enter, through and",
        ),
        (
            {"tower": Undescribed(4, "packed"), "stages": ({"it": 1, **LLM},), "recompute": ({"it": 1},)},
            "Undescribed has 3 blocks with its projector, and its layers() describe 1",
        ),
    ],
)
def test_a_cut_that_cannot_be_is_named(options, said):
    assert said in said_of(**options)


@pytest.mark.parametrize(("num_parts", "said"), [(3, ""), (4, "fills bubbles with halves of blocks of 'image'")])
def test_halves_that_cannot_be_are_named(num_parts, said):
    model = build_hf_model()
    llm = Unit("llm", ({"backbone": 1}, {"backbone": 2}), pp=2, zero=0)
    units = llm, Unit("image", ({"image": 3},), dp=2, zero=0), Unit("audio", ({"audio": 2},), dp=2, zero=0)
    plan = Plan(model_spec(model), cluster("h100", 1, 2), units, 2)
    unfilled, encoders = fillable(plan)
    fills = []
    for fill in coarse_fills(unfilled.program, encoders):
        is_image = parse_action(fill.action).stage < 4
        fills += [replace(fill, action=f"{fill.action}.{part}") for part in range(num_parts)] if is_image else [fill]
    plan = replace(plan, fills=tuple(fills))
    assert not impossible_cut(model, plan)
    model.encoders["image"].encoder.__class__ = Whole
    assert impossible_cut(model, plan) == (said and f"unit 'image' {said}, which cannot be: Whole has no halves")


def test_an_encoder_that_is_not_cut_needs_no_parts():
    assert not said_of(ToyEncoder(4, "packed"), ({"it": 1}, LLM))


@pytest.mark.parametrize(("planned", "in_hand", "cp"), [(True, False, 1), (False, True, 2), (True, False, 2)])
def test_items_that_ranks_share_in_the_plan_alone_are_refused_where_they_would(planned, in_hand, cp):
    spec = model_spec(build_hf_model(dropout=0.2))
    assert all(module.shareable for module in spec.modules if module.name != "backbone")
    model, other = (
        replace(spec, modules=tuple(replace(each, shareable=each.shareable and can) for each in spec.modules))
        for can in (planned, in_hand)
    )
    unit = Unit("all", ({"image": 3, "audio": 2, **LLM},), cp=cp)
    chosen = ChosenPlan(Plan(model, cluster("h100", 1, cp), (unit,), 2), Path("plan.json"), lambda _: "REPLAN")
    if not planned or cp == 1:
        chosen.check_model(other)
        return
    with pytest.raises(UserError, match=r"ranks share items of image, which cannot be in the model in hand; .*REPLAN"):
        chosen.check_model(other)


@pytest.mark.parametrize(
    ("part", "other"), [("tiled", {"tile_rows": 0}), ("tiled", {"tile_rows": 9}), ("keys", {"token_parts": 1})]
)
def test_items_that_are_cut_otherwise_than_the_model_does_are_refused_where_ranks_share_them(part, other):
    model = model_spec(build_hf_model(parts=(part,)))
    image = model.module("image")
    assert image.shareable and (image.tile_rows, image.token_parts) == {"tiled": (4, 1), "keys": (0, NUM_KEYS)}[part]
    of_plan = [replace(each, **other) if each is image else each for each in model.modules]
    unit = Unit("all", ({"image": 3, "audio": 2, **LLM},), cp=2)
    plan = Plan(replace(model, modules=tuple(of_plan)), cluster("h100", 1, 2), (unit,), 2)
    with pytest.raises(UserError, match="ranks share items of image, which cannot be"):
        ChosenPlan(plan, Path("plan.json"), lambda _: "REPLAN").check_model(model)
    unshared = [replace(each, shareable=False, tile_rows=0, token_parts=1) for each in model.modules]
    plan = replace(plan, model=replace(model, modules=tuple(unshared)))
    ChosenPlan(plan, Path("plan.json"), lambda _: "REPLAN").check_model(model)


def test_a_plan_that_knows_of_no_merge_trains_a_model_that_has_one():
    """Only its prediction lacks what moves for it."""
    spec = model_spec(build_hf_model())
    plan = Plan(spec, cluster("h100", 1, 2), (Unit("all", ({"image": 3, "audio": 2, **LLM},), cp=2),), 2)
    ChosenPlan(plan, Path("plan.json"), lambda _: "REPLAN").check_model(replace(spec, merges=True))
