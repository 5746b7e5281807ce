"""Videos and images in one batch, one of them, or neither: two ranks have the losses of one; bad ones are left out."""

import json
from pathlib import Path

import pytest

from benchmark import benchmark
from motet.core.errors import UserError
from motet.train.recipe.recipe_file import load_recipe
from motet.train.trainer import train
from ranks import run_ranks

pytest.importorskip("av")
with benchmark("whole_models") as whole_models:
    pass

STEPS = (("images", ""), ("", ""), ("video", ""), ("video", "image"), ("", "video"))
"""What the two examples of each step have: two images, or one. Of the first video the end of the file is missing."""


WAYS = {
    "qwen2_5_vl": (),
    "qwen3_vl": ("balance.mode=exchange",),
    "llava_onevision": (),
    "smolvlm": ("balance.mode=exchange",),
    "qwen2_5_omni": ("balance.mode=exchange",),
    "qwen2_5_omni_sound": ("balance.mode=exchange",),
}
"""Family -> how two ranks train it. Videos of Qwen3-VL and SmolVLM stand in pieces; Qwen2.5-Omni has clips, too, and
the last family reads videos with their sound."""


@pytest.fixture(
    scope="module", params=[pytest.param(name, marks=() if name == "qwen3_vl" else pytest.mark.slow) for name in WAYS]
)
def job(request, tmp_path_factory):
    folder = tmp_path_factory.mktemp("videos")
    whole_models.write_job(folder, request.param)
    image = next(folder.glob("media/*.png")).relative_to(folder)
    clips = [path.relative_to(folder) for path in sorted(folder.glob("media/*.wav"))]
    records = []
    for number, kind in enumerate(kind for step in STEPS for kind in step):
        if not kind and clips and number % 2:
            kind, media = "audio", {"audio": str(clips[number % len(clips)])}
        elif kind == "video":
            # The first is an AVI, whose header counts frames that the file lacks.
            num_frames, with_sound = 12 if number > 4 else 8, request.param in whole_models.HEARD_FAMILIES
            name = f"media/of-{number}"
            video = whole_models.write_video(folder, name, 3 * number + 2, num_frames, with_sound=with_sound)
            media = {"video": video}
            bad = folder / media["video"]
            if number == 4:
                bad.write_bytes(bad.read_bytes()[: bad.stat().st_size // 2])
        else:
            media = {"images": {"image": [str(image)] * 2}, "image": {"image": str(image)}, "": {}}[kind]
        mark = {"images": "<image>\n<image>\n", "": ""}.get(kind, f"<{kind}>\n")
        turns = [{"from": "human", "value": f"{mark}What is {number}?"}, {"from": "gpt", "value": "It is that."}]
        records.append({"conversations": turns, **media})
    (folder / "train.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
    return folder


def trained(rank, num_ranks, recipe, overrides):
    train(load_recipe(Path(recipe), overrides))


def steps_of(job, run_dir, num_ranks, *overrides):
    run_ranks(
        trained,
        num_ranks,
        str(job / "recipe.toml"),
        [
            *("run.dtype=float64", f"run.steps={len(STEPS)}", "run.batch_size=2", "data.shuffle=false"),
            *(f"run.dir={run_dir}", "data.max_bad_fraction=0.5", "data.num_workers=1", *overrides),
        ],
    )
    return [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]


@pytest.fixture(scope="module")
def alone(job, tmp_path_factory):
    return steps_of(job, tmp_path_factory.mktemp("alone") / "run", 1)


def test_a_video_that_is_cut_off_is_left_out_and_named(alone):
    assert [step["num_examples"] for step in alone] == [2, 2, 1, 2, 2]
    (left_out,) = alone[2]["left_out"]
    assert left_out["file"].endswith("of-4.avi") and "line 5" in left_out["line"]
    assert "cut off or damaged" in left_out["why"] or "is damaged: frame" in left_out["why"]


def test_losses_of_two_ranks_are_those_of_one(job, alone, tmp_path, request):
    shared = steps_of(job, tmp_path / "run", 2, *WAYS[request.node.callspec.params["job"]])
    for one, two in zip(alone, shared, strict=True):
        assert two["loss"] == pytest.approx(one["loss"], rel=1e-10)
        assert two["grad_norm"] == pytest.approx(one["grad_norm"], rel=1e-10)
        assert two["left_out"] == one["left_out"]


def test_frames_that_a_recipe_asks_for_are_taken(job):
    read = ["model.video.fps=3.0", "model.video.max_frames=4"]
    assert load_recipe(job / "recipe.toml", read).transform("image").sampling.fps == 3.0
    with pytest.raises(UserError, match="it must have one of `fps` and `num_frames`"):
        load_recipe(job / "recipe.toml", ["model.video.max_frames=4"])
    other = job / "other"
    whole_models.write_job(other, "llava", 2)
    with pytest.raises(UserError, match="has no effect, as the model reads no videos"):
        load_recipe(other / "recipe.toml", ["model.video.fps=1.0"]).transform("image")
    line = (job / "train.jsonl").read_text().splitlines()[6]
    (other / "train.jsonl").write_text(line.replace("media/", "../media/") + "\n")
    recipe = load_recipe(other / "recipe.toml", ["data.num_workers=0", f"run.dir={other / 'run'}"])
    with pytest.raises(UserError, match=r"train.jsonl holds video media, but the model has no encoder for them"):
        train(recipe)
