"""`motet train` of the generator of clips that docs/models.md has: the same on one rank and on two, and it learns."""

import json
import re
from pathlib import Path

import numpy as np
import pytest
import soundfile
from PIL import Image

from cli.on_ranks import motet_on_ranks
from cli.tiny_job import metrics, write_tiny_job

GUIDE = Path(__file__).parents[2] / "docs" / "models.md"
TINY = {
    "model.generators.speak.config.hidden": 16,
    "model.generators.speak.config.num_layers": 1,
    "model.generators.speak.config.num_heads": 2,
    "model.generators.speak.sampling.steps": 3,
}


@pytest.fixture(scope="module")
def job(tmp_path_factory):
    """A tiny job in which some examples ask for a clip, of several lengths."""
    recipe = write_tiny_job(tmp_path_factory.mktemp("job") / "data", num_train=8, num_heldout=2)
    folder, rng, asked = recipe.parent, np.random.default_rng(0), []
    for number, seconds in enumerate((0.1, 0.25, 0.06, 0.4)):
        name = f"media/said-{number}.wav"
        soundfile.write(folder / name, 0.3 * rng.standard_normal(int(16_000 * seconds)), 16_000)
        turns = [{"from": "human", "value": f"say {'abcd'[number]}"}, {"from": "gpt", "value": "so: <audio>"}]
        asked.append(json.dumps({"conversations": turns, "audio": [name]}) + "\n")
    for split in ("train", "heldout"):
        file = folder / f"{split}.jsonl"
        file.write_text(file.read_text() + "".join(asked))
    [table] = [block for block in re.findall(r"```toml\n(.*?)```", GUIDE.read_text(), re.S) if "speak" in block]
    recipe.write_text(f"{recipe.read_text()}\n{table}")
    return recipe


def trained(job, num_ranks, folder):
    options = TINY | {"run.dir": folder, "run.dtype": "float64", "run.steps": 12, "run.report_to": "[]"}
    options |= {"evaluate.num_made": 8, "fsdp.shard_size": 1, "optimizer.lr": 0.02, "optimizer.warmup_steps": 1}
    ended = motet_on_ranks(num_ranks, "train", job, *(f"--set={key}={value}" for key, value in options.items()))
    assert ended.returncode == 0, ended.stderr
    return metrics(folder)


def test_clips_are_learned_and_made_alike_on_one_rank_and_on_two(job, tmp_path):
    one, two = (trained(job, ranks, tmp_path / str(ranks)) for ranks in (1, 2))
    for a, b in zip(one, two, strict=True):
        assert b["losses"] == pytest.approx(a["losses"], rel=1e-9)
        assert b["grad_norm"] == pytest.approx(a["grad_norm"], rel=1e-8)
    spoken = [line["losses"]["speak"] for line in one if line["losses"]["speak"]]
    assert sum(spoken[-3:]) < 0.8 * sum(spoken[:3])

    [first, *_] = made = json.loads((tmp_path / "1" / "made.json").read_text())
    assert [item["generator"] for item in made] == ["speak"] * 4
    with Image.open(tmp_path / "1" / first["file"]) as shown:
        assert shown.size == (5, 64)  # 0.1 seconds, in hops of 320 samples of 16 kHz.
    for item, other in zip(made, json.loads((tmp_path / "2" / "made.json").read_text()), strict=True):
        assert (tmp_path / "1" / item["file"]).read_bytes() == (tmp_path / "2" / other["file"]).read_bytes()
