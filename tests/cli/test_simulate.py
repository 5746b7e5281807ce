"""`motet simulate` from files to tables, traces and pictures; what is wrong is one sentence, and exit code 2."""

import json
import re
import subprocess
import sys
from dataclasses import replace

import pytest

from cli.tiny_job import write_tiny_job
from motet.cli import main
from motet.core.plan import Unit
from motet.core.plan_file import write_plan
from motet.schedule import program_of
from unit.simulate.jobs import CHAIN, WHOLE, plan

PLAN = plan(Unit("all", CHAIN, dp=2, pp=3))

SAMPLER = """
[[task]]
name = "chat"
text = { median = 40, spread = 0.8, max = 400 }
[task.items.image]
length = { value = 64 }
length_per_token = 4
[task.items.audio]
length = { value = 32 }
length_per_token = 8
"""
TABLE = """text_tokens,image_width,image_height,audio_seconds
20,280,280,1.5
9,,,2
30,560,280,
"""


@pytest.fixture
def simulate(tmp_path, monkeypatch, capsys):
    """Runs the command in a folder: (exit code, stdout in one line, stderr)."""
    monkeypatch.chdir(tmp_path)
    # A table is as wide as its terminal.
    monkeypatch.setenv("COLUMNS", "200")

    def run(*arguments):
        monkeypatch.setattr(sys, "argv", ["motet", "simulate", *map(str, arguments)])
        with pytest.raises(SystemExit) as exit_:
            main()
        said = capsys.readouterr()
        return exit_.value.code or 0, " ".join(said.out.split()), said.err.strip()

    return run


@pytest.fixture
def files(tmp_path):
    """A plan that stands alone, and lengths for it."""
    write_plan(PLAN, tmp_path / "plan.json")
    (tmp_path / "lengths.toml").write_text(SAMPLER)
    (tmp_path / "lengths.csv").write_text(TABLE)
    return tmp_path


@pytest.fixture(scope="module")
def job(tmp_path_factory):
    return write_tiny_job(tmp_path_factory.mktemp("job") / "data").parent


@pytest.mark.parametrize("source", ["lengths.toml", "lengths.csv", "manifest"])
def test_lengths_from_distributions_a_table_and_a_manifest(source, files, simulate, job):
    lengths = job / "train.jsonl" if source == "manifest" else source
    code, out, err = simulate("plan.json", "--workload", lengths)
    assert (code, err) == (0, "")
    assert "all: ranks 0 to 5 = 2 data x 3 pipeline, ZeRO-1." in out
    for word in ("tokens/s", "MFU", "activations", "PP warm-up", "of 1.0 GB"):
        assert word in out
    assert "Out of memory" not in out


def test_segments_of_items_take_less_than_the_items(files, simulate):
    long = SAMPLER.replace("value = 64", "value = 8192").replace("length_per_token = 4", "length_per_token = 64")
    steps_us = []
    for number, segment in enumerate(("", "segment = 8192\n", "segment = 64\n")):
        (files / "long.toml").write_text(long.replace("[task.items.audio]", segment + "[task.items.audio]"))
        code, _, err = simulate("plan.json", "--workload", "long.toml", "--trace", f"{number}.json")
        assert (code, err) == (0, "")
        events = json.loads((files / f"{number}.json").read_text())["traceEvents"]
        steps_us.append(max(event["ts"] + event["dur"] for event in events if "dur" in event))
    assert steps_us[0] == steps_us[1] > 1.05 * steps_us[2]


def test_padded_clips_have_no_segments(files, simulate, job):
    (files / "lengths.toml").write_text(SAMPLER + "segment = 8\n")
    code, _, err = simulate(
        job / "recipe.toml", "--cluster", "h100", "--ranks-per-node", "2", "--workload", "lengths.toml"
    )
    assert code == 2
    assert "pads whole items, so its items can have no segments" in err


@pytest.mark.parametrize("policy", ["padded", "packed", "{ image = 'padded', audio = 'packed', backbone = 'padded' }"])
def test_a_policy_moves_items_and_is_said(policy, job, simulate):
    words = "recipe.toml", "--cluster", "h100", "--ranks-per-node", "2", "--set", "balance.method=per_phase"
    code, out, err = simulate(job / words[0], *words[1:], "--set", f"balance.policy={policy}")
    assert (code, err) == (0, "")
    for name, how in (("image", "padded to the longest"), ("audio", "packed"), ("backbone", "padded to the longest")):
        differs = name in policy or policy == ("padded" if name == "image" else "packed" if name == "audio" else "")
        assert (f"Those of {name} are balanced as if {how}." in out) == differs


def test_a_plan_of_a_recipes_model_and_data(job, simulate):
    unit = {"name": "all", "stages": [{"image": 1, "audio": 1}, {"backbone": 2}], "pp": 2}
    document = {"motet_plan": 1, "model": "recipe.toml", "cluster": {"device": "h100"}, "units": [unit]}
    (job / "plan.json").write_text(json.dumps({**document, "batch_size": 4}))
    code, out, _ = simulate(job / "plan.json")
    assert code == 0
    assert "recipe, " in out and "on 1 node of 8 h100" in out and "HFU" in out


def test_trace_page_and_picture_are_written(files, simulate):
    code, out, _ = simulate(
        "plan.json", "--workload", "lengths.toml", "--trace", "t.json", "--html", "t.html", "--png", "t.png"
    )
    assert code == 0
    for name in ("t.json", "t.html", "t.png"):
        assert f"Wrote {name}." in out
        assert (files / name).stat().st_size > 1000
    events = json.loads((files / "t.json").read_text())["traceEvents"]
    assert {event["pid"] for event in events} and any(event["name"].startswith("2B") for event in events)
    assert (files / "t.png").read_bytes().startswith(b"\x89PNG")
    assert "plan, predicted" in (files / "t.html").read_text()


def test_batches_are_drawn_by_seed_and_the_slowest_is_shown(files, simulate):
    options = "plan.json", "--workload", "lengths.toml"
    one, other, jittered = (simulate(*options, *more)[1] for more in ((), ("--seed", 1), ("--jitter", 0.3)))
    assert simulate(*options)[1] == one
    assert len({one, other, jittered}) == 3
    code, out, _ = simulate(*options, "--batches", 3, "--jitter", 0.1)
    assert code == 0
    assert "Of 3 batches, a step takes " in out and out.endswith("in the slowest, shown here.")
    shown = out.split("Predicted step")[1].split("examples/s")[0].split()[-2:]
    assert f"and {' '.join(shown)} in the slowest" in out


def test_lack_of_memory_is_predicted(files, simulate):
    small = replace(PLAN.cluster, device=replace(PLAN.cluster.device, memory_bytes=50_000))
    write_plan(replace(PLAN, cluster=small), files / "small.json")
    code, out, _ = simulate("small.json", "--workload", "lengths.toml")
    assert code == 0
    assert "Out of memory on 6 of 6 ranks: rank" in out and "of unit 'all', needs" in out
    assert out.endswith("the test has 0.05 MB.")


def test_a_plan_that_stands_alone_is_simulated_without_torch(files):
    code = "import sys; from motet.cli import main\ntry: main()\nfinally: sys.exit('torch' in sys.modules)"
    command = [sys.executable, "-c", code, "simulate", "plan.json", "--workload", "lengths.toml"]
    subprocess.run(command, cwd=files, check=True, stdout=subprocess.DEVNULL)


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        (
            {"units": (Unit("all", CHAIN, dp=20, pp=3),)},
            "plan.json: unit 'all' is on ranks 0 to 59; the cluster has ranks 0 to 31.",
        ),
        (
            {"units": (Unit("all", ({**WHOLE, "backbone": 7},)),)},
            "plan.json: module 'backbone' has 8 layers; the plan's stages hold 7.",
        ),
        (
            {"batch_size": 3},
            "plan.json: batch_size is 3; it must be a multiple of dp * microbatch_size of the backbone, 2.",
        ),
        ({"precision": "fp8"}, "device 'test' has no peak in 'fp8'; it has one in bf16, fp32."),
    ],
)
def test_a_plan_that_does_not_fit(changes, said, files, simulate):
    write_plan(replace(PLAN, **changes), files / "plan.json")
    assert simulate("plan.json", "--workload", "lengths.toml") == (2, "", said)


def test_a_device_that_is_not_in_the_catalogue(files, simulate):
    document = json.loads((files / "plan.json").read_text())
    (files / "plan.json").write_text(json.dumps({**document, "cluster": {"device": "h1000"}}))
    code, out, err = simulate("plan.json", "--workload", "lengths.toml")
    assert (code, out) == (2, "")
    assert err.startswith("plan.json: 'cluster' is wrong: there is no device 'h1000'")


@pytest.mark.parametrize(
    ("lengths", "said"),
    [
        (
            "text_tokens,num_images,image_tokens\n9,1,256\n",
            "The model's module 'audio' needs lengths, but lengths.csv has none of it; it has image, backbone.",
        ),
        (
            "tokens,frames\n9,256\n",
            "lengths.csv, line 1: names no known column; it must name some of image_width, image_height, num_images, "
            "image_tokens, audio_seconds, text_tokens.",
        ),
        (
            "text_tokens\n0\n0\n",
            "The model's module 'image' needs lengths, but lengths.csv has none of it; it has backbone.",
        ),
    ],
)
def test_a_table_without_what_is_needed(lengths, said, files, simulate):
    (files / "lengths.csv").write_text(lengths)
    assert simulate("plan.json", "--workload", "lengths.csv") == (2, "", said)


def test_distributions_without_a_needed_module(files, simulate):
    (files / "lengths.toml").write_text(SAMPLER[: SAMPLER.index("[task.items.audio]")])
    code, _, err = simulate("plan.json", "--workload", "lengths.toml")
    assert code == 2
    assert err == "The model's module 'audio' needs lengths, but lengths.toml has none of it; it has image, backbone."


@pytest.mark.parametrize(
    ("document", "said"),
    [
        (None, "Cannot read the plan plan.json: No such file or directory."),
        ({"motet_plan": 1, "units": []}, "plan.json: 'model' is missing and has no default."),
        ({"motet_plan": 1, "unit": []}, "plan.json: unknown key 'unit'; did you mean 'units'?"),
    ],
)
def test_a_wrong_plan(document, said, tmp_path, simulate):
    if document is not None:
        (tmp_path / "plan.json").write_text(json.dumps(document))
    assert simulate("plan.json") == (2, "", said)


def test_a_recipe_as_it_trains(job, simulate):
    code, out, err = simulate(
        job / "recipe.toml", "--cluster", "h100", "--ranks-per-node", 3, "--set", "fsdp.param_dtype=bfloat16"
    )
    assert (code, err) == (0, "")
    assert "on 1 node of 3 h100, in bf16" in out
    assert "Items are balanced over ranks: one assignment for all modules or one" in " ".join(out.split())


@pytest.mark.parametrize("option", [("--cluster", "h100"), ("--nodes", 2), ("--ranks-per-node", 2)])
def test_options_of_recipes_are_not_for_plans(option, files, simulate):
    code, _, err = simulate("plan.json", "--workload", "lengths.toml", *option)
    assert code == 2
    assert err == (
        "--cluster, --nodes and --ranks-per-node are for a recipe; plan.json is a plan, which says all that itself."
    )


@pytest.mark.parametrize("file", ["lengths.toml", "lengths.csv"])
def test_settings_are_not_for_lengths_that_no_recipe_has(file, files, simulate):
    said = f"--set is for a recipe; {file}, which has the lengths, is none."
    assert simulate("plan.json", "--workload", file, "--set", "run.batch_size=4") == (2, "", said)


@pytest.mark.parametrize(
    ("outputs", "said"),
    [
        (["--json", "plan.json"], "plan.json cannot be written: this command reads it; name another file."),
        (
            ["--html", "step", "--png", "step"],
            "step cannot be written: another output of this command has that name; name another file.",
        ),
    ],
)
def test_nothing_is_written_over_the_plan_or_over_another_output(outputs, said, files, simulate):
    before = (files / "plan.json").read_text()
    assert simulate("plan.json", "--workload", "lengths.toml", *outputs) == (2, "", said)
    assert (files / "plan.json").read_text() == before


def test_the_actions_of_a_rank_are_printed_instead_of_the_tables(files, simulate):
    code, out, err = simulate("plan.json", "--workload", "lengths.toml", "--actions", 3, "--trace", "t.json")
    assert (code, err) == (0, "")
    assert out.startswith("# rank 3, ") and "Predicted step" not in out and out.endswith("Wrote t.json.")
    program = program_of(PLAN)
    printed = [word for word in out.split() if re.fullmatch(r"\d+[A-Z][A-Z_]*\d*([<>]\d+)?", word)]
    assert printed == [str(action) for action in program.actions[1]]


def test_a_rank_that_the_plan_does_not_use_has_no_actions(files, simulate):
    asked = ("plan.json", "--workload", "lengths.toml", "--actions")
    said = "--actions 6: no unit of the plan is on rank 6: 'all' is on 0 to 5."
    assert simulate(*asked, 6) == (2, "", said)
    assert simulate(*asked, -1)[0] == 2
