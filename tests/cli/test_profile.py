"""`motet profile`, and training that is balanced on what it measured."""

import json
from contextlib import redirect_stdout
from io import StringIO
from pathlib import Path

import numpy as np
import pytest
from PIL import Image
from typer.testing import CliRunner

from cli.tiny_job import losses, metrics, write_tiny_job
from motet.cli import app
from motet.core.cluster import Cluster, Device, Link
from motet.core.errors import UserError
from motet.cost.flops import work_of
from motet.cost.profile import read_profile
from motet.cost.profiled import Profiled
from motet.models.spec import spec_of_config
from motet.planning.cluster import ClusterOptions
from motet.planning.decoding import decoding_need
from motet.planning.job import JobOptions
from motet.planning.plan_of_recipe import read_recipe_as_plan
from motet.planning.sources import plan_at
from motet.profiling.command import profile
from motet.train.recipe.recipe_file import load_recipe
from motet.train.trainer import train
from ranks import run_ranks

# Without dropout, whose mask depends on where an item is computed, and in float64, losses do not depend on balancing.
EXACT = ("run.dtype=float64", "model.encoders.audio.config.dropout=0.0", "data.heldout=[]", "run.steps=4")
SMALL = ("transforms.image.max_pixels_side=64",)
MAX_TURN = 30
GENERATOR = f"""
[model.generators.draw]
makes = "image"
family = "dit"
condition = "turn"
max_turn = {MAX_TURN}
config = {{ row_dim = 16, hidden = 16, num_layers = 1, num_heads = 2 }}

[transforms.draw]
patch_size = 4
channels = 1
max_pixels_side = 64
"""


@pytest.fixture(scope="module")
def job(tmp_path_factory):
    return write_tiny_job(tmp_path_factory.mktemp("job") / "data", num_train=24, num_heldout=2)


@pytest.fixture(scope="module")
def measured(job, tmp_path_factory):
    """A profile made on two ranks, and what the first of them printed."""
    path = tmp_path_factory.mktemp("profile") / "measured.json"
    return path, run_ranks(profile_rank, 2, str(job), [*EXACT, *SMALL], str(path))


@pytest.fixture(scope="module")
def of_two(measured, tmp_path_factory):
    """The same profile with seconds that grow with the lengths: so do measured ones, if nothing else runs beside."""
    path, printed = measured
    return altered(path, tmp_path_factory.mktemp("profile") / "two.json", grown), printed


def grown(stored):
    """Layers whose rows are of items, as a resampler's queries, grow with the lengths of a batch, too."""
    for module in stored["modules"]:
        for which in ("grid", "held_out"):
            lengths = [sum(count * length for count, length in batch) for batch in module[which]]
            for layer in module["layers"]:
                for column in ("forward_s", "input_s", "weight_s"):
                    layer[which][column] = [1e-4 + 1e-6 * length for length in lengths]


def measure_little(patch):
    """Once rather than until the medians have settled, and caches are not filled with other data: no test is about how
    exact the seconds are."""
    patch.setattr("motet.profiling.stopwatch._CACHED_BYTES", 2**12)
    patch.setattr("motet.profiling.measure.MIN_ROUNDS", 1)
    patch.setattr("motet.profiling.ranks._ROUNDS", 1)
    patch.setattr("motet.profiling.ranks._REPEATS", 1)


def profile_rank(rank, num_ranks, recipe, overrides, path):
    measure_little(pytest.MonkeyPatch())
    with redirect_stdout(StringIO()) as printed:
        profile(load_recipe(Path(recipe), overrides), "tiny", out=Path(path), seconds=0.5)
    return printed.getvalue()


def train_rank(rank, num_ranks, recipe, overrides):
    with redirect_stdout(StringIO()):
        try:
            train(load_recipe(Path(recipe), overrides[rank % len(overrides)]))
        except UserError as error:
            return str(error)
    return ""


def run(job, num_ranks, run_dir, *overrides):
    common = [*EXACT, *SMALL, f"run.dir={run_dir}"]
    ranks = [[*common, *own] for own in overrides] if overrides and isinstance(overrides[0], list) else None
    return run_ranks(train_rank, num_ranks, str(job), ranks or [[*common, *overrides]])


def test_the_command_writes_a_profile_of_the_whole_model_and_prints_its_error(job, tmp_path, monkeypatch):
    measure_little(monkeypatch)
    sets = [part for override in (f"run.dir={tmp_path}", *SMALL) for part in ("--set", override)]
    done = CliRunner().invoke(app, ["profile", str(job), "--seconds", "1", *sets], catch_exceptions=False)
    assert done.exit_code == 0
    for said in (
        "interpolated",
        "attention",
        "strided_convolution",
        "ns a length",
        f"Profile: {tmp_path}/profile.json",
    ):
        assert said in done.output
    found = read_profile(tmp_path / "profile.json")
    assert (found.recipe, found.num_ranks, found.messages) == ("recipe", 1, ())
    cluster = Cluster(Device("cpu", {}, 1, 1.0), 1, 1, Link(1e9, 0.0), Link(1e9, 0.0))
    cost = Profiled(found, cluster)
    for module in spec_of_config(load_recipe(job).model, 45).modules:
        for layer in module.layers:
            work = work_of(layer, np.array([16, 32]), padded=module.padded)
            if layer.kind != "head":  # of another vocabulary here
                seconds = cost.layer_seconds(module.name, layer, work)
                assert all(np.isfinite(column).all() and (column >= 0).all() for column in seconds)
    # All that learns, and shares of it: what a tensor costs is told apart from what its numbers cost.
    spec = spec_of_config(load_recipe(job).model, 45)
    learning = sum(layer.parameters for module in spec.modules for layer in module.layers if layer.trainable)
    assert found.optimizer.num_parameters[0] == pytest.approx(learning, rel=0.2)
    assert found.optimizer.num_parameters[0] > 6 * found.optimizer.num_parameters[-1]
    assert cost.step_seconds(10**6) >= cost.step_seconds(10) > 0


@pytest.mark.slow
def test_ranks_measure_messages_and_shared_layers(measured):
    path, printed = measured
    found = read_profile(path)
    assert printed[1] == "" and "all-reduce" in printed[0]
    kinds = {"gather", "reduce_scatter", "all_reduce", "exchange", "send", "call"}
    assert {times.kind for times in found.messages} == kinds
    assert {(times.num_ranks, times.num_nodes) for times in found.messages} == {(2, 1)}
    shared = {(module.name, layer.kind) for module in found.modules for layer in module.layers if layer.tp == 2}
    assert shared == {("backbone", "attention"), ("audio", "attention")}
    # Why the third cannot be shared is said in the file and in the table.
    assert [sentence.partition(":")[0] for sentence in found.left_out] == ["image"]
    assert "Left out: image: tensor parallelism: its layers have" in printed[0]
    assert "proj, qkv" in found.why_unshared("image", 2)


@pytest.mark.slow
def test_decoding_is_timed_and_says_which_cores_a_job_needs(job, of_two, tmp_path):
    path, printed = of_two
    assert "Decoding on one core" in printed[0]
    measured = read_profile(path)
    assert {(times.phase, times.codec) for times in measured.decoding} == {("audio", ".wav"), ("image", ".png")}
    slow = [times.model_copy(update={"seconds": (1.0,) * len(times.seconds)}) for times in measured.decoding]
    measured.model_copy(update={"decoding": tuple(slow)}).write(tmp_path / "slow.json")
    # Half of the examples have an image, half a clip: a second of a core for each example.
    options = [*EXACT, "data.num_workers=2"]
    need = decoding_need(job, options, tmp_path / "slow.json")
    on_two, _ = read_recipe_as_plan(job, options, JobOptions(ClusterOptions("cpu", 1, 2)))
    words = need.words(0.5, on_two)
    assert words.startswith("Decoding takes 6 s of a core a step, so 12 CPU cores keep every rank computing; with the ")
    assert words.endswith("recipe's 4 workers (2 a rank), each step waits 1 s for them (67% of it).")
    assert need.words(2.0, on_two).endswith("no step waits for them.")
    figures = {"core_s": 6.0, "cores": 12, "workers": 4, "stall_s": 1.0, "stall_share": 2 / 3}
    assert need.figures(0.5, on_two) == pytest.approx(figures)
    # motet plan has the same beside each plan, for the seconds of its step.
    sets = [part for override in options for part in ("--set", override)]
    command = ["plan", str(job), "--profile", str(tmp_path / "slow.json"), "--ranks-per-node", "2", "--no-what-if"]
    files = ["--out", str(tmp_path / "plan.json"), "--json", "-"]
    done = CliRunner().invoke(app, [*command, *files, *sets], catch_exceptions=False)
    assert done.exit_code == 0, done.output
    best = json.loads(done.stdout)[0]
    assert best["decoding"] == pytest.approx(need.figures(best["step_s"], plan_at(tmp_path / "plan.json")))
    measured.model_copy(update={"decoding": ()}).write(tmp_path / "none.json")
    assert decoding_need(job, options, tmp_path / "none.json") is None


@pytest.mark.slow
def test_training_balanced_on_measured_cost_has_the_same_losses(job, of_two, tmp_path):
    measured = ('balance.cost="profile"', f'balance.profile="{of_two[0]}"')
    assert set(run(job, 2, tmp_path / "length", "balance.cost=length")) == {""}
    assert set(run(job, 2, tmp_path / "profile", *measured)) == {""}
    assert np.allclose(losses(tmp_path / "profile"), losses(tmp_path / "length"), rtol=1e-9, atol=0)
    by_length, by_time = (metrics(tmp_path / name)[0]["phases"]["backbone"] for name in ("length", "profile"))
    assert (by_time["unit"], by_length["unit"]) == ("ps", "tokens")
    assert sum(by_time["loads"]) > 1000 * sum(by_length["loads"])
    assert metrics(tmp_path / "profile")[0]["balance"]["predicted_s"]


@pytest.mark.slow
def test_the_file_is_looked_for_in_the_runs_folder(job, of_two, tmp_path):
    (tmp_path / "profile.json").write_bytes(of_two[0].read_bytes())
    assert run(job, 1, tmp_path, 'balance.cost="profile"') == [""]


def altered(source, path, change):
    stored = json.loads(source.read_text())
    change(stored)
    path.write_text(json.dumps(stored))
    return path


@pytest.mark.slow
def test_wrong_combinations_are_one_sentence_with_exit_code_2(job, of_two, tmp_path):
    without_audio = altered(of_two[0], tmp_path / "a.json", lambda p: p.update(modules=p["modules"][:1]))
    other = altered(of_two[0], tmp_path / "b.json", lambda p: p["modules"][2]["layers"][1].update(weights=7))
    in_bf16 = altered(of_two[0], tmp_path / "c.json", lambda p: p.update(precision="bfloat16"))
    for overrides, said in (
        (['balance.cost="profile"'], f"Cannot read the profile {tmp_path}/run/profile.json"),
        (['balance.cost="profile"', f'balance.profile="{without_audio}"'], "has no module 'audio', only 'image'"),
        (['balance.cost="profile"', f'balance.profile="{other}"'], "is of another model"),
        (['balance.cost="profile"', f'balance.profile="{in_bf16}"'], "was measured in bfloat16"),
    ):
        (sentence,) = run(job, 1, tmp_path / "run", *overrides)
        assert said in sentence and "\n" not in sentence


@pytest.mark.parametrize(
    ("overrides", "said"),
    [
        (('balance.cost="profile"', "balance.costs={image={linear=2}}"), 'set cost = "length", or remove costs'),
        (("balance.costs={image={linear=2}}",), 'with cost = "flops" items are not weighed by their lengths'),
        (('balance.profile="x.json"',), "has no effect without"),
        (('balance.cost="profile"', 'balance.phases="off"'), "has no effect with phases"),
        (('balance.cost="profile"', "balance.speed.device_tflops=1"), "speed.device_tflops has no effect"),
        (('balance.cost="time"',), "'balance.cost' must be 'flops', 'length' or 'profile', not 'time'"),
    ],
)
def test_a_recipe_with_options_without_effect_is_refused(job, overrides, said):
    with pytest.raises(UserError, match=said):
        load_recipe(job, overrides)


@pytest.mark.slow
def test_ranks_with_different_profiles_are_refused(job, of_two, tmp_path):
    other = altered(of_two[0], tmp_path / "other.json", lambda stored: stored.update(recipe="another"))
    told = run(
        job,
        2,
        tmp_path / "run",
        ['balance.cost="profile"', f'balance.profile="{of_two[0]}"'],
        ['balance.cost="profile"', f'balance.profile="{other}"'],
    )
    assert (
        told
        == [
            "Rank 1 has read another profile than rank 0, so they would not decide alike: copy one file to all "
            "machines, or name one that all of them see in balance.profile."
        ]
        * 2
    )


@pytest.mark.slow
def test_a_recipe_is_simulated_from_what_was_measured(job, of_two):
    path, _ = of_two
    arguments = ["simulate", str(job), "--ranks-per-node", "2", "--profile", str(path), *_set(*SMALL)]
    wrong = CliRunner().invoke(app, arguments)
    assert isinstance(wrong.exception, UserError)
    assert "was measured in float64 and the plan computes in fp32" in str(wrong.exception)
    found = CliRunner().invoke(app, [*arguments, *_set("run.dtype=float64")])
    assert found.exit_code == 0, found.exception
    assert "on 1 node of 2 cpu, in fp64" in " ".join(found.output.split())


@pytest.fixture
def with_turns(tmp_path):
    recipe = write_tiny_job(tmp_path / "data", num_train=6, num_heldout=0)
    Image.effect_noise((8, 12), 60.0).save(recipe.parent / "media" / "drawn.png")
    turns = [{"from": "human", "value": "draw a line"}, {"from": "gpt", "value": "see: <image>"}]
    manifest = recipe.with_name("train.jsonl")
    asked = json.dumps({"conversations": turns, "image": ["media/drawn.png"]}) + "\n"
    manifest.write_text(manifest.read_text() + asked * 6)
    recipe.write_text(recipe.read_text() + GENERATOR)
    return recipe


@pytest.mark.slow
def test_a_profile_a_plan_and_its_simulation_know_turns(with_turns, tmp_path, monkeypatch):
    measure_little(monkeypatch)
    exact = ("run.dtype=float64", "data.heldout=[]", *SMALL)
    measured, found = tmp_path / "measured.json", tmp_path / "plan.json"
    with redirect_stdout(StringIO()):
        profile(load_recipe(with_turns, exact), "tiny", out=measured, seconds=0.2)
    [draw] = [each for each in read_profile(measured).modules if each.name == "draw"]
    [conditions] = [each for each in draw.layers if each.kind == "projector"]
    counts = [sum(count for count, _ in batch) for batch in draw.grid]
    assert list(conditions.grid.rows) == [count * MAX_TURN for count in counts]

    def said(command, *words):
        done = CliRunner().invoke(app, [command, str(with_turns), "--profile", str(measured), *words, *_set(*exact)])
        assert done.exit_code == 0, done.output
        return done.output

    quick = ("--ranks-per-node", "1", "--pin", "strategy=data-parallel", "--no-what-if")
    said("plan", *quick, "--out", str(found))
    [unit] = json.loads(found.read_text())["units"]
    assert {"draw", "backbone"} <= {name for stage in unit["stages"] for name in stage}
    assert json.loads(said("simulate", "--ranks-per-node", "1", "--json", "-"))["trainable"]


def _set(*overrides):
    return [word for override in overrides for word in ("--set", override)]
