"""Encoders that feed several stages of the backbone: edges, what goes along each, and what cannot be."""

from dataclasses import replace

from motet.core.plan import Plan, Unit
from motet.core.plan_file import read_plan, write_plan
from motet.core.shapes import Transformer, connect, language_model, multimodal, vit
from motet.cost.catalogue import cluster
from motet.schedule import planned
from motet.schedule.edges import edge_outputs

IMAGE = connect(vit("image", Transformer(32, 128, 4), num_layers=2), output_dim=64)
AUDIO = replace(IMAGE, name="audio")
BACKBONE = language_model(Transformer(64, 256, 4, causal=True), num_layers=4, vocab_size=100)
MODEL = multimodal("tiny", BACKBONE, [IMAGE, AUDIO], again={"image": (1, 3)})
BLOCKS = tuple({"backbone": 1} for _ in range(4))


def carried(*units):
    """Edge -> the modules whose outputs it carries, in stages by number."""
    plan = Plan(MODEL, cluster("h100", 1, 8), units, 4)
    program = planned(plan)
    return {
        edge: [name for name, _ in edge_outputs(program.layout, *(program.stages[end] for end in edge))]
        for edge in program.program.edges
    }


def test_an_encoder_on_ranks_of_its_own_feeds_the_stages_that_its_rows_enter():
    units = Unit("image", ({"image": 2},)), Unit("audio", ({"audio": 2},), 1), Unit("llm", BLOCKS, 2, pp=4)
    assert carried(*units) == {
        **{(stage, stage + 1): ["backbone"] for stage in (2, 3, 4)},
        **{(0, stage): ["image"] for stage in (2, 3, 5)},
        (1, 2): ["audio"],
    }


def test_what_else_its_unit_computes_goes_to_the_first_stage_alone():
    units = Unit("encoders", ({"image": 2, "audio": 2},)), Unit("llm", BLOCKS, 1, pp=4)
    sent = carried(*units)
    assert sent[0, 1] == ["image", "audio"] and sent[0, 2] == sent[0, 4] == ["image"]


def test_in_a_chain_rows_ride_along_until_they_have_entered():
    stages = {"image": 2, "audio": 2, "backbone": 1}, *BLOCKS[1:]
    assert carried(Unit("all", stages, pp=4)) == {
        (0, 1): ["image", "backbone"],
        (1, 2): ["image", "backbone"],
        (2, 3): ["image", "backbone"],
    }
    stages = {"image": 2, "audio": 2}, {"backbone": 2}, {"backbone": 2}
    assert carried(Unit("all", stages, pp=3))[1, 2] == ["image", "backbone"]
    assert carried(Unit("all", ({"image": 2, "audio": 2, "backbone": 3}, {"backbone": 1}), pp=2))[0, 1] == [
        "image",
        "backbone",
    ]


def test_copies_feed_the_stages_that_their_rows_enter():
    sent = carried(Unit("llm", BLOCKS, pp=4, replicated=("image", "audio")))
    images, audios = (
        {edge[1]: sent[edge] for edge in sent if edge[0] in copies} for copies in (range(4, 8), range(8, 12))
    )
    assert images == {0: ["image"], 1: ["image"], 2: [], 3: ["image"]}
    assert audios == {0: ["audio"], 1: [], 2: [], 3: []}


def test_pipelines_in_bubbles_feed_the_stages_that_their_rows_enter():
    units = Unit("llm", BLOCKS, pp=4), Unit("image", ({"image": 1}, {"image": 1}), dp=2, pp=2, zero=0)
    sent = carried(*units, Unit("audio", ({"audio": 2},), dp=4, zero=0))
    images, audios = (
        {edge: sent[edge] for edge in sent if edge[0] in stages} for stages in (range(4, 8), range(8, 12))
    )
    assert images == {
        (4, 5): ["image"],
        (6, 7): ["image"],
        **{(last, sink): ["image"] for last in (5, 7) for sink in (0, 1, 3)},
    }
    assert audios == {(only, 0): ["audio"] for only in range(8, 12)}


def test_a_plan_file_has_them(tmp_path):
    plan = Plan(MODEL, cluster("h100", 1, 1), (Unit("all", (MODEL.num_blocks,)),), 4)
    write_plan(plan, tmp_path / "plan.json")
    assert read_plan(tmp_path / "plan.json").model.reentries == (("image", "backbone", 1), ("image", "backbone", 3))
