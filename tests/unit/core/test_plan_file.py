import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from motet.core.cluster import Cluster, Device, Link
from motet.core.errors import ArgumentError, UserError
from motet.core.plan import Fill, Plan, Unit
from motet.core.plan_file import read_plan, write_plan
from motet.core.spec import Attention, Layer, ModelSpec, Module, Stack

counts, sizes, ranks = st.integers(1, 9), st.integers(0, 2**40), st.integers(0, 2**20 - 1)
amounts = st.floats(0, 1e3, allow_nan=False)
speeds = st.floats(1e-300, 1e21)
shares = st.floats(0, 1)
names = st.text(min_size=1, max_size=6)
flags = st.booleans()
attentions = st.builds(Attention, sizes, sizes, flags, sizes, shares)
layers = st.builds(Layer, names, sizes, sizes, counts, sizes, st.none() | attentions, counts, sizes, flags, flags)
modules = st.builds(Module, names, st.lists(st.builds(Stack, layers, counts), max_size=3).map(tuple), flags)
links = st.builds(Link, speeds, amounts)
devices = st.builds(Device, names, st.dictionaries(names, speeds, max_size=2), counts, speeds)
clusters = st.builds(Cluster, devices, counts, counts, links, links)
parts = st.lists(st.dictionaries(names, sizes, max_size=2), max_size=3).map(tuple)
units = st.builds(
    Unit, names, parts, ranks, counts, counts, counts, counts,
    st.lists(names, max_size=2).map(tuple), parts, st.sampled_from([0, 1, 2, 3]), ranks,
)  # fmt: skip
fills = st.builds(Fill, ranks, names, st.text(max_size=4))


@st.composite
def specs(draw):
    chosen = tuple(draw(st.lists(modules, max_size=3, unique_by=lambda module: module.name)))
    edges = [(a.name, b.name) for i, a in enumerate(chosen) for b in chosen[i + 1 :] if draw(flags)]
    return ModelSpec(draw(names), chosen, tuple(edges))


plans = st.builds(
    Plan, specs(), clusters, st.lists(units, max_size=2).map(tuple), counts, counts,
    st.sampled_from(["gpipe", "1f1b", "interleaved_1f1b", "zb_h1", "zb_v", "data_parallel"]), flags, names,
    st.sampled_from(["off", "joint", "per_phase", "auto"]), st.lists(fills, max_size=2).map(tuple),
    st.sampled_from(["given", "intra", "inter", "both"]), st.dictionaries(names, sizes, max_size=2),
    filling=st.sampled_from(["static", "by_step"]),
)  # fmt: skip


@given(plan=plans)
@settings(max_examples=100, deadline=None)
def test_what_is_written_is_read_back_as_it_was(plan, tmp_path_factory):
    path = tmp_path_factory.getbasetemp() / "plan.json"
    write_plan(plan, path)
    assert read_plan(path) == plan


LAYER = Layer("attention", 12 * 4096**2, 12 * 4096**2 + 9000, 4096, 60000, Attention(4096, 1024, causal=True))
SPEC = ModelSpec(
    "small",
    (Module("image", (Stack(LAYER, 24),)), Module("backbone", (Stack(LAYER, 32), Stack(LAYER)))),
    (("image", "backbone"),),
)
CLUSTER = Cluster(Device("h100", {"bf16": 989e12}, 80 * 10**9, 3.35e12), 2, 8, Link(450e9, 5e-6), Link(50e9, 1e-5))
PLAN = Plan(SPEC, CLUSTER, (Unit("all", ({"image": 24, "backbone": 9}, {"backbone": 24}), dp=8, pp=2),), batch_size=64)


@pytest.fixture
def document(tmp_path):
    SPEC.modules[0].layers  # what is cached on the data is no part of it  # noqa: B018
    write_plan(PLAN, tmp_path / "plan.json")
    return json.loads((tmp_path / "plan.json").read_text())


def read(document, tmp_path, **lookups):
    (tmp_path / "plan.json").write_text(document if isinstance(document, str) else json.dumps(document))
    return read_plan(tmp_path / "plan.json", **lookups)


def complaint(document, tmp_path, **lookups) -> str:
    with pytest.raises(UserError) as caught:
        read(document, tmp_path, **lookups)
    sentence = str(caught.value)
    assert "plan.json" in sentence and "\n" not in sentence
    return sentence.removeprefix(f"{tmp_path / 'plan.json'}: ")


def test_the_file_is_short_and_without_defaults(document, tmp_path):
    text = (tmp_path / "plan.json").read_text()
    assert len(text.splitlines()) < 45 and max(map(len, text.splitlines())) <= 120
    assert document["model"]["modules"][0]["stacks"][0]["count"] == 24
    assert document["units"] == [
        {"name": "all", "stages": [{"image": 24, "backbone": 9}, {"backbone": 24}], "dp": 8, "pp": 2}
    ]
    assert not {"schedule", "fills", "filling", "order", "microbatch_caps", "policy"} & set(document)


@pytest.mark.parametrize(
    ("key", "value", "sentence"),
    [
        (["units", 0, "zeroo"], 1, "unknown key 'units[0].zeroo'; did you mean 'zero'?"),
        (["units", 0, "dp"], "8", "'units[0].dp' must be a whole number, not \"8\"."),
        (["units", 0, "dp"], 1.5, "'units[0].dp' must be a whole number, not 1.5."),
        (["units", 0, "dp"], True, "'units[0].dp' must be a whole number, not true."),
        (["units", 0, "dp"], 0, "'units[0].dp' must be at least 1, not 0."),
        (["units", 0, "stages", 1], {"backbone": -2},
         "'units[0].stages[1].backbone' must be at least 0, not -2."),
        (["units", 0, "stages"], {"image": 1}, "'units[0].stages' must be a list."),
        (["units", 0, "zero"], 4, "'units[0].zero' must be 0, 1, 2 or 3, not 4."),
        (["batch_size"], None, "'batch_size' must be a whole number, not null."),
        (["schedule"], "2f2b", "'schedule' must be 'gpipe', '1f1b', 'interleaved_1f1b', 'zb_h1', 'zb_v' or "
         "'data_parallel', not \"2f2b\"."),
        (["order"], "outer", "'order' must be 'given', 'intra', 'inter' or 'both', not \"outer\"."),
        (["filling"], "by step", "'filling' must be 'static' or 'by_step', not \"by step\"."),
        (["policy"], {"image": "pad"}, "'policy.image' must be 'packed', 'padded' or 'padded_attention', not \"pad\"."),
        (["policy"], "padded", "'policy' must be a table, not \"padded\"."),
        (["microbatch_caps"], {"image": -1}, "'microbatch_caps.image' must be at least 0, not -1."),
        (["model", "modules", 0, "stacks", 0, "layer", "attention", "causl"], True,
         "unknown key 'model.modules[0].stacks[0].layer.attention.causl'; did you mean 'causal'?"),
        (["model", "edges"], [["image", "llm"]],
         "'model' is wrong: small: an edge names 'llm'; the modules are image, backbone."),
        (["cluster", "intra_node", "bytes_per_s"], 0.0,
         "'cluster.intra_node.bytes_per_s' must be greater than 0, not 0.0."),
        (["cluster", "device", "peak_flops"], {"bf16": 0.0},
         "'cluster.device.peak_flops.bf16' must be greater than 0, not 0.0."),
        (["cluster", "device", "memory_bytes_per_s"], 0.0,
         "'cluster.device.memory_bytes_per_s' must be greater than 0, not 0.0."),
        (["model", "modules", 0, "stacks", 0, "layer", "attention", "density"], 1.5,
         "'model.modules[0].stacks[0].layer.attention.density' must be at most 1, not 1.5."),
        (["model", "modules", 0, "stacks", 0, "layer", "output_width"], 0,
         "'model.modules[0].stacks[0].layer.output_width' must be at least 1, not 0."),
        (["model", "modules", 0, "stacks", 0, "layer", "weights"], 10**18,
         "'model.modules[0].stacks[0].layer.weights' must be at most 10,000,000,000,000,000, not "
         "1000000000000000000."),
        (["batch_size"], 10**12, "'batch_size' must be at most 1,000,000, not 1000000000000."),
        (["model", "modules", 0, "stacks", 0, "count"], 10**9,
         "'model.modules[0].stacks[0].count' must be at most 16,384, not 1000000000."),
        (["hue"], "red", "unknown key 'hue'; known here: model, cluster, units, batch_size, microbatch_size, "
         "schedule, deferred_warmup, precision, balance, fills, order, microbatch_caps, policy, filling, moments."),
    ],
)  # fmt: skip
def test_a_wrong_value_is_named_by_its_key(document, tmp_path, key, value, sentence):
    place = document
    for part in key[:-1]:
        place = place[part]
    place[key[-1]] = value
    assert complaint(document, tmp_path) == sentence


def test_a_missing_key_is_named(document, tmp_path):
    del document["units"][0]["stages"]
    assert complaint(document, tmp_path) == "'units[0].stages' is missing and has no default."


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("{\n oops", "line 2: is no JSON (Expecting property name enclosed in double quotes, column 2)"),
        ("[]", 'is no plan: it must be a table with the keys "motet_plan"'),
        ("{}", 'it must have "motet_plan": 1'),
        ('{"motet_plan": 2}', 'it must have "motet_plan": 1'),
        ("[" * 100_000, "nests lists and tables more than 100 deep"),
        ('{"motet_plan": 1, "batch_size": ' + "1" * 5000 + "}", "has a number of more than 4,300 digits"),
        ('{"motet_plan": 1, "batch_size": NaN}', "has NaN, for which JSON has no word"),
        ('{"motet_plan": 1, "batch_size": 1, "batch_size": 2}', "has the key 'batch_size' twice"),
    ],
)
def test_what_is_no_plan_is_refused(text, said, tmp_path):
    assert said in complaint(text, tmp_path)


def test_a_file_that_is_missing_or_cannot_be_written(tmp_path):
    with pytest.raises(UserError, match=r"Cannot read the plan .*none\.json: No such file"):
        read_plan(tmp_path / "none.json")
    with pytest.raises(UserError, match="cannot be written to"):
        write_plan(PLAN, tmp_path / "none" / "plan.json")


def test_model_and_cluster_by_name(document, tmp_path):
    document |= {"model": "recipes/small.toml", "cluster": {"device": "h100", "num_nodes": 2}}
    asked = []

    def model_at(path):
        asked.append(path)
        return SPEC

    def cluster_named(device, num_nodes, ranks_per_node):
        if device != "h100":
            raise ArgumentError(f"there is no device {device!r}.")
        asked.append((device, num_nodes, ranks_per_node))
        return CLUSTER

    assert read(document, tmp_path, model_at=model_at, cluster_named=cluster_named) == PLAN
    assert asked == [tmp_path / "recipes/small.toml", ("h100", 2, None)]
    assert "'model' is a path" in complaint(document, tmp_path)
    assert "'cluster.device' is a name" in complaint(document, tmp_path, model_at=model_at)
    for cluster, said in [
        ({"device": "h100", "nodes": 3}, "unknown key 'cluster.nodes'; did you mean 'num_nodes'?"),
        ({"device": "h100", "num_nodes": "3"}, "'cluster.num_nodes' must be a whole number, not \"3\"."),
        ({"device": "h100", "num_nodes": 0}, "'cluster.num_nodes' must be at least 1, not 0."),
        ({"device": "h1000"}, "'cluster' is wrong: there is no device 'h1000'."),
    ]:
        document["cluster"] = cluster
        assert complaint(document, tmp_path, model_at=model_at, cluster_named=cluster_named) == said
