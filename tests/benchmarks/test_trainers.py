"""benchmarks/trainers.py gives both sides the same work, and says so where they do not do it."""

import json

import pytest
import torch

from benchmark import benchmark

SIDES = ("Trainer", "Motet, whole copies", "Motet, sharded")


@pytest.fixture(scope="module")
def trainers():
    with benchmark("trainers") as module:
        yield module


@pytest.fixture(scope="module")
def peer(trainers):
    with benchmark("trainers_peer") as module:
        yield module


@pytest.fixture(scope="module")
def told(trainers, tmp_path_factory):
    """Two examples with images and one without, for one rank."""
    weights = tmp_path_factory.mktemp("trainers") / "weights.safetensors"
    trainers.save_weights(3, weights)
    batch = [trainers.Example(9, 1), trainers.Example(5, 0), trainers.Example(14, 2)]
    return trainers.Work([batch], 1, "padded", str(weights), seed=3)


@pytest.mark.parametrize("collator", ["padded", "packed"])
def test_both_sides_compute_one_loss(trainers, peer, told, collator):
    from safetensors.torch import load_file

    examples = peer.Examples(told)
    given = getattr(peer, collator)([examples[place] for place in range(3)])
    theirs = peer.build_llava()
    theirs.load_state_dict(load_file(told.weights))
    with torch.no_grad():
        expected = theirs(**given, num_items_in_batch=(given["labels"] != peer.IGNORED).sum()).loss
    model = trainers.build_model(told.weights)
    batch = trainers.Batches(told, model, rank=0).prepare(0)
    with torch.no_grad():
        features = {"image": model.encoders["image"](*batch.media["image"])}
        loss, num_targets = model.backbone(batch.sequences, features)
    assert num_targets == sum(example.num_targets for example in told.batches[0])
    torch.testing.assert_close(loss / num_targets, expected, rtol=trainers.SAME, atol=0)


def test_batches_grouped_by_length_are_padded_by_less(trainers, tmp_path):
    drawn = {name: trainers.draw(case, tmp_path / "none", 0) for name, case in trainers.CASES.items()}
    size = trainers.EXAMPLES_A_RANK * trainers.NUM_RANKS
    assert {(len(batches), *map(len, batches)) for batches in drawn.values()} == {(6, *[size] * 6)}
    assert drawn["padded"] == drawn["packed"]
    assert {example for batch in drawn["equal"] for example in batch} == {trainers.EQUAL}

    def fill(batches):
        """Real tokens over padded ones."""
        lengths = [[example.num_tokens for example in batch] for batch in batches]
        return sum(map(sum, lengths)) / sum(len(batch) * max(batch) for batch in lengths)

    assert fill(drawn["padded"]) < 0.5 < 0.9 < fill(drawn["grouped"])


def taken(seconds, loss=2.0):
    return {
        side: {"step_s": s, "processor_s": s, "since_start_s": 9.0, "loss": loss} for side, s in zip(SIDES, seconds)
    }


@pytest.mark.parametrize(("whole_s", "code"), [(0.9, 0), (1.1, 1)])
def test_a_step_slower_than_the_trainers_misses_the_goal(trainers, tmp_path, monkeypatch, capsys, whole_s, code):
    def run_pair(peers_python, told, ours, number, num_rounds):
        assert ours == list(SIDES[1:])
        return [taken((1.0, whole_s, 3.0))] * (1 + num_rounds)

    monkeypatch.setattr(trainers, "run_pair", run_pair)
    path = tmp_path / "rows.json"
    monkeypatch.setattr(
        "sys.argv", ["trainers.py", "--only", "equal", "--json", str(path), "--lengths", str(tmp_path / "none")]
    )
    with pytest.raises(SystemExit) as ended:
        trainers.main()
    rows = {row["name"]: row for row in json.loads(path.read_text())["rows"]}
    told = rows["equal lengths: Motet, whole copies, real tokens/s of the Trainer's"]
    assert ended.value.code == code and told["met"] is (code == 0) and told["goal"] == 1
    assert told["value"] == pytest.approx(1 / whole_s)
    sharded = rows["equal lengths: Motet, sharded, real tokens/s of the Trainer's"]
    assert sharded["value"] == pytest.approx(1 / 3) and sharded["goal"] is None
    assert rows["equal lengths: losses differ by at most"]["met"]


def test_one_side_alone_can_be_compared(trainers, tmp_path, monkeypatch, capsys):
    def run_pair(peers_python, told, ours, number, num_rounds):
        assert ours == ["Motet, whole copies"]
        return [{side: taken((1.0, 0.5, 3.0))[side] for side in ("Trainer", *ours)}] * (1 + num_rounds)

    monkeypatch.setattr(trainers, "run_pair", run_pair)
    words = ["--only", "grouped", "--sides", "whole", "--pairs", "6", "--rounds", "6"]
    monkeypatch.setattr("sys.argv", ["trainers.py", *words, "--lengths", str(tmp_path / "none")])
    with pytest.raises(SystemExit, match="0"):
        trainers.main()
    said = capsys.readouterr().out
    assert "grouped by length: Motet, whole copies, real tokens/s of the Trainer's" in said and "sharded" not in said


@pytest.mark.parametrize("other", [2.0 + 5e-6, float("nan")])
def test_sides_that_train_other_steps_are_not_compared(trainers, other):
    figures = taken((1.0, 1.0, 1.0))
    figures[SIDES[1]]["loss"] = 2.0 + 1e-6
    assert trainers.agreeing(figures) is figures
    figures[SIDES[1]]["loss"] = other
    with pytest.raises(SystemExit, match="losses differ"):
        trainers.agreeing(figures)
