"""The recipe of a training phase: what it says outweighs the recipe, and the command line outweighs both."""

import pytest

from motet.core.errors import UserError
from motet.train.recipe.reading import of_phase, of_phases, phase_names, read_recipe

RECIPE = """\
export = { at_end = true }
optimizer = { lr = 1e-4, betas = [0.9, 0.95] }
[run]
dir = "run"
batch_size = 8
seed = 1

[model.backbone]
family = "qwen2"
train = true
[model.encoders.image]
family = "siglip"
[model.encoders.audio]
module = "own:Audio"

[[run.phase]]
name = "one"
steps = 10
learns = ["image", "audio.projector"]
optimizer = { lr = 1e-3 }

[[run.phase]]
name = "two"
steps = 20
batch_size = 16
learns = "all"
model = { freeze = ["*.norm.*"] }

[[run.phase]]
name = "three"
steps = 30
"""
SHAPES = """\
workload = {}
[run]
dir = "run"
batch_size = 8
[model.backbone]
num_layers = 2
[model.encoders.image]
projector = { kind = "mlp" }
[model.generators.draw]
num_layers = 1
[[run.phase]]
name = "one"
steps = 10
learns = "projectors"
"""


def tables(tmp_path, phase, *overrides, text=RECIPE):
    recipe = tmp_path / "recipe.toml"
    recipe.write_text(text)
    return read_recipe(recipe, of_phase(overrides, phase)).tables


def test_names_are_in_order_unless_one_is_chosen(tmp_path):
    recipe = tmp_path / "recipe.toml"
    recipe.write_text(RECIPE)
    assert phase_names(recipe, ["run.seed=2"]) == ("one", "two", "three")
    assert phase_names(recipe, of_phase([], "two")) == ()
    recipe.write_text("run = { steps = 3 }")
    assert phase_names(recipe) == ()
    with pytest.raises(UserError, match=r"has no such phase; it has none\."):
        read_recipe(recipe, of_phase([], "two"))


def test_a_phase_outweighs_the_recipe_key_by_key_and_begins_where_the_one_before_ended(tmp_path):
    one, two, three = (tables(tmp_path, name) for name in ("one", "two", "three"))
    assert one["run"] == {"dir": "run/one", "batch_size": 8, "seed": 1, "steps": 10}
    assert one["optimizer"] == {"lr": 1e-3, "betas": [0.9, 0.95]} and three["optimizer"]["lr"] == 1e-4
    start = "run/one/checkpoints/step-00000010"
    assert two["run"] == {"dir": "run/two", "batch_size": 16, "seed": 1, "steps": 20, "start": start}
    assert three["run"]["start"] == "run/two/checkpoints/step-00000020"
    assert [each["export"]["at_end"] for each in (one, two, three)] == [False, False, True]


def test_what_is_exported_of_adapters_is_said_of_the_phase_that_exports(tmp_path):
    """A phase before it may have no adapters, beside which `adapter` has no effect and would be refused."""
    text = RECIPE.replace("at_end = true", 'at_end = true, adapter = "merged"')
    exports = [tables(tmp_path, name, text=text)["export"] for name in ("one", "two", "three")]
    assert exports == [{"at_end": False}, {"at_end": False}, {"at_end": True, "adapter": "merged"}]
    own = text.replace("learns = ", 'export = { at_end = true, adapter = "saved" }\nlearns = ', 1)
    assert tables(tmp_path, "one", text=own)["export"] == {"at_end": True, "adapter": "saved"}


def test_what_learns_is_said_of_every_part(tmp_path):
    def learning(name):
        model = tables(tmp_path, name)["model"]
        encoders = model["encoders"]
        halves = [
            encoders[each].get(half) for each in ("image", "audio") for half in ("train_encoder", "train_projector")
        ]
        return [model["backbone"]["train"], *halves]

    assert learning("one") == [False, True, True, False, True]
    assert learning("two") == [True] * 5
    assert learning("three") == [True] + [None] * 4
    assert tables(tmp_path, "two")["model"]["freeze"] == ["*.norm.*"]
    shapes = tables(tmp_path, "one", text=SHAPES)["model"]
    assert shapes["backbone"]["train"] is shapes["encoders"]["image"]["train"] is False
    assert shapes["encoders"]["image"]["projector"] == {"kind": "mlp", "train": True}
    assert shapes["generators"] == {"draw": {"num_layers": 1, "train": False, "projector": {"train": True}}}
    shapes = tables(tmp_path, "one", text=SHAPES.replace("projectors", "draw.generator"))["model"]
    assert shapes["generators"]["draw"] == {"num_layers": 1, "train": True, "projector": {"train": False}}
    broken = SHAPES.replace('{ kind = "mlp" }', '"mlp"')
    assert tables(tmp_path, "one", text=broken)["model"]["encoders"] == {"image": {"projector": "mlp"}}


def test_the_command_line_outweighs_phases_and_moves_them_together(tmp_path):
    overrides = ("run.dir=other", "run.steps=5", "optimizer.lr=2.0")
    two = tables(tmp_path, "two", *overrides)
    assert two["run"]["start"] == "other/one/checkpoints/step-00000005"
    assert (two["run"]["dir"], two["run"]["steps"], two["optimizer"]["lr"]) == ("other/two", 5, 2.0)
    assert tables(tmp_path, "two", "run.start=mine")["run"]["start"] == "mine"
    # Checkpoints of phases lie apart at a URL, as they do in run.dir.
    url = "checkpoint.url=s3://bucket/run"
    assert tables(tmp_path, "two", url)["checkpoint"]["url"] == "s3://bucket/run/two"


def test_a_recipe_without_a_choice_says_how_to_choose(tmp_path):
    recipe = tmp_path / "recipe.toml"
    recipe.write_text(RECIPE)
    with pytest.raises(
        UserError, match=r"trains in phases \(one, two, three\): choose one with --set run\.phase=one\."
    ):
        read_recipe(recipe)


def test_a_whole_model_says_itself_what_learns(tmp_path):
    text = 'run = { dir = "run", phase = [{ name = "one", steps = 3, learns = "all" }] }\nmodel = { path = "llava" }\n'
    with pytest.raises(UserError, match=r"in place of learns say which learn, such as model = \{ train = "):
        tables(tmp_path, "one", text=text)
    said = text.replace('learns = "all"', "model = { train = { image = false } }")
    assert tables(tmp_path, "one", text=said)["model"] == {"path": "llava", "train": {"image": False}}


def test_a_start_that_the_recipe_states_is_that_of_the_first_phase(tmp_path):
    text = RECIPE.replace("seed = 1\n", 'seed = 1\nstart = "older"\n')
    starts = [tables(tmp_path, name, text=text)["run"]["start"] for name in ("one", "two", "three")]
    assert starts == ["older", "run/one/checkpoints/step-00000010", "run/two/checkpoints/step-00000020"]
    given = of_phases(["run.start=newer", "run.seed=2"], ("one", "two"))
    assert given == {
        "one": ["run.start=newer", "run.seed=2", "run.phase=one"],
        "two": ["run.seed=2", "run.phase=two"],
    }


def test_a_phase_has_steps_or_epochs(tmp_path):
    text = RECIPE.replace("steps = 10\n", "epochs = 1.5\n")
    one, two = (tables(tmp_path, name, text=text)["run"] for name in ("one", "two"))
    assert (one["epochs"], "steps" in one, two["start"]) == (1.5, False, "run/one")
    for said, wrong in (("", "has neither steps nor epochs"), ("steps = 10\nepochs = 1.5", "has steps and epochs")):
        with pytest.raises(UserError, match=rf"recipe\.toml, line \d+: .*phase one {wrong}"):
            tables(tmp_path, "one", text=RECIPE.replace("steps = 10", said))


def adapters(*phases):
    """A recipe of phases, each with the adapters of the backbone that it states."""
    text = RECIPE[: RECIPE.index("[[run.phase]]")]
    return text + "\n".join(
        f'[[run.phase]]\nname = "{name}"\nsteps = 1\n'
        + (f"model = {{ lora = {{ backbone = {stated} }} }}\n" if stated else "")
        for name, stated in zip("abc", phases)
    )


@pytest.mark.parametrize(
    ("phases", "said"),
    [
        (
            ("{ rank = 4 }", ""),
            r"phase b has no model\.lora\.backbone, and begins with the adapters that phase a learned",
        ),
        (
            ("{ rank = 4 }", "{ rank = 8 }"),
            r"model\.lora\.backbone\.rank of phase b is not that of phase a, with whose",
        ),
        (
            ("{ rank = 4 }", "{ rank = 4, alpha = 4 }"),
            r"model\.lora\.backbone\.alpha of phase b is not that of phase a",
        ),
        (("{ rank = 4 }", "{ rank = 4, targets = ['q_proj'] }"), r"model\.lora\.backbone\.targets of phase b is not"),
        (("{ rank = 4 }", "{ rank = 4, path = 'saved' }"), r"model\.lora\.backbone\.path of phase b is not that of"),
        (
            ("{ rank = 4 }", "{ rank = 4, rank_stabilized = true }"),
            r"backbone\.rank_stabilized of phase b is not that of",
        ),
    ],
)
def test_adapters_that_a_phase_would_lose_or_change_are_refused_before_it_trains(tmp_path, phases, said):
    with pytest.raises(UserError, match=rf"recipe\.toml, line \d+: .*{said}"):
        tables(tmp_path, "b", text=adapters(*phases))


def test_a_phase_goes_on_with_the_adapter_of_a_whole_model_that_the_one_before_took(tmp_path):
    def phase(name, path):
        return f'{{ name = "{name}", steps = 3, model = {{ lora = {{ path = "{path}" }} }} }}'

    def text(*paths):
        phases = ", ".join(map(phase, "ab", paths))
        return f'run = {{ dir = "run", phase = [{phases}] }}\nmodel = {{ path = "llava" }}\n'

    assert tables(tmp_path, "b", text=text("saved", "saved"))["model"]["lora"] == {"path": "saved"}
    with pytest.raises(UserError, match=r"model\.lora\.path of phase b is not that of phase a, with whose adapters"):
        tables(tmp_path, "b", text=text("saved", "other"))


def test_adapters_that_a_phase_keeps_or_begins_are_accepted(tmp_path):
    for phases in (("{ rank = 4 }", "{ rank = 4, alpha = 8.0, dropout = 0.1 }"), ("", "{ rank = 4 }")):
        assert tables(tmp_path, "b", text=adapters(*phases))["model"]["lora"]["backbone"]["rank"] == 4
    wrong = adapters("{ rank = 4 }", "{ rank = 0 }")  # It is refused where the phase's recipe is validated.
    assert tables(tmp_path, "b", text=wrong)["model"]["lora"]["backbone"] == {"rank": 0}
    lost = adapters("{ rank = 4 }", "")
    assert tables(tmp_path, "b", "run.start=mine", text=lost)["run"]["start"] == "mine"


def test_adapters_of_a_part_that_does_not_learn_in_a_phase_are_refused(tmp_path):
    text = RECIPE.replace("train = true\n", "train = true\n[model.lora.backbone]\nrank = 4\n")
    with pytest.raises(
        UserError, match=r"recipe.toml, line \d+: model\.lora\.backbone gives adapters to a part that do"
    ):
        tables(tmp_path, "one", text=text)
    assert tables(tmp_path, "two", "run.start=mine", text=text)["model"]["lora"]


def test_a_key_that_one_phase_alone_has_can_be_removed_of_it(tmp_path):
    text = '[run]\ndir = "runs"\nbatch_size = 2\n[[run.phase]]\nname = "a"\nsteps = 2\n'
    text += '[[run.phase]]\nname = "b"\nsteps = 2\noptimizer = { lr = 1.0 }\n'
    (tmp_path / "recipe.toml").write_text(text)
    removed = read_recipe(tmp_path / "recipe.toml", of_phase(["~optimizer.lr"], "b"))
    assert removed.tables["optimizer"] == {} and removed.set_keys == {("optimizer", "lr")}
    assert removed.tables["run"]["start"] == "runs/a/checkpoints/step-00000002"
    assert of_phases(["~run.start"], ["a", "b"]) == {"a": ["~run.start", "run.phase=a"], "b": ["run.phase=b"]}
