"""The losses at both ends of a run: of different steps, however short it is, and of finite ones alone."""

import json
from types import SimpleNamespace

import pytest

from motet.train.report.peak import Peak
from motet.train.report.summary import summarise, summary_lines

WORLD = SimpleNamespace(num_ranks=2, device=SimpleNamespace(type="cpu"))
LOADS = {"bound": 3, "loads": [3, 2], "loads_before": [4, 1]}


def step(number, loss):
    return {
        "step": number,
        "loss": loss,
        "bad_step": None if loss is not None else "first in the output of backbone",
        "step_s": 0.5,
        "num_tokens": 10,
        "mfu": 0.1,
        "data_wait_s": 0.0,
        "decide_s": 0.0,
        "core_wait_s": 0.0,
        "bytes": {"p2p": number, "exchange": 0, "gather": 10, "reduce": 0},
        "exchange": {"bytes": 0, "crossing_bytes": 0},
        "memory": {"peak_bytes": 1, "kind": "resident"},
        "balance": {"methods": {"joint": 1}, "why": {}},
        "phases": {"backbone": {"unit": "GFLOP", "max_over_bound": 1.0, "max_over_bound_before": 1.5}},
        "bad_examples": 0,
    }


def summed_up(tmp_path, losses, loads=LOADS, cut=()):
    steps = [step(number, loss) for number, loss in enumerate(losses, start=1)]
    for each in steps:
        each["phases"]["backbone"] |= loads
    for each, gained_s in zip(steps, cut):
        each["balance"]["cut"] = {"sequences": 1, "microbatches": 1, "gained_s": gained_s}
    lines = [json.dumps(each) for each in steps]
    (tmp_path / "metrics.jsonl").write_text("\n".join(lines) + "\n")
    summary = summarise(tmp_path, WORLD, Peak(1e9, "measured"), 5.0, {})
    return summary, summary_lines(summary)


@pytest.mark.parametrize(
    ("num_steps", "first", "last", "said"),
    [
        (1, 1, 1, "loss 1.0000 in its one step"),
        (2, 1, 2, "loss 1.0000 in its first step, 2.0000 in its last"),
        (3, 1, 3, "loss 1.0000 in its first step, 3.0000 in its last"),
        (4, 1.5, 3.5, "loss 1.5000 at first, 3.5000 at last (means of 2 steps)"),
        (10, 3, 8, "loss 3.0000 at first, 8.0000 at last (means of 5 steps)"),
        (19, 5, 15, "loss 5.0000 at first, 15.0000 at last (means of 9 steps)"),
        (30, 5.5, 25.5, "loss 5.5000 at first, 25.5000 at last (means of 10 steps)"),
    ],
)
def test_the_first_and_the_last_losses_are_of_different_steps(tmp_path, num_steps, first, last, said):
    summary, lines = summed_up(tmp_path, range(1, num_steps + 1))
    assert (summary["loss_first"], summary["loss_last"]) == (first, last)
    assert lines[1] == said


def test_one_step_is_no_steps(tmp_path):
    (_, alone), (_, two) = summed_up(tmp_path, [1]), summed_up(tmp_path, [1, 2])
    assert alone[0].startswith("1 step on 2 ranks in ") and two[0].startswith("2 steps on 2 ranks in ")


def test_the_time_that_is_printed_is_that_of_all_steps(tmp_path):
    """Tokens a second are over it, and a run that goes on has taken few of its steps itself."""
    (summary, (line, *_)) = summed_up(tmp_path, [1, 2, 3])
    assert summary["train_s"] == 1.5
    assert line.startswith("3 steps on 2 ranks in 1.5 s: 20 tokens/s")


@pytest.mark.parametrize(("loads", "are_told"), [(LOADS, True), ({"bound": 3, "loads": [3]}, False)])
def test_loads_of_a_phase_with_several_replicas_are_told(tmp_path, loads, are_told):
    _, lines = summed_up(tmp_path, [1], loads)
    assert ("backbone: mean max/bound load 1.500 before balancing, 1.000 after, in GFLOP" in lines) == are_told


@pytest.mark.parametrize(
    ("gained_s", "said"),
    [([0.5, None, -0.25], ", 0.25 s gained by prediction"), ([-0.5], ", 0.5 s lost by prediction")],
)
def test_what_cuts_gain_is_summed_over_the_steps_that_know_it(tmp_path, gained_s, said):
    summary, lines = summed_up(tmp_path, [1, 2, 3], cut=gained_s)
    assert summary["balance"]["cut"]["gained_s"] == sum(each or 0 for each in gained_s)
    assert any(" cut over ranks in " in line and line.endswith(said) for line in lines)


def test_steps_that_were_not_finite_have_no_loss_and_are_counted(tmp_path):
    summary, lines = summed_up(tmp_path, [None, 2, 4, None])
    assert (summary["loss_first"], summary["loss_last"], summary["bad_steps"]) == (2, 4, 2)
    assert lines[1:3] == [
        "loss 2.0000 in its first step, 4.0000 in its last",
        "2 steps were not finite and changed nothing; bad_steps.jsonl names them",
    ]
    summary, lines = summed_up(tmp_path, [None])
    assert summary["loss_first"] is None
    assert lines[1:3] == [
        "no step with a finite loss",
        "1 step was not finite and changed nothing; bad_steps.jsonl names them",
    ]


def test_bytes_are_summed_by_kind_unless_a_line_lacks_them(tmp_path):
    assert summed_up(tmp_path, [1, 1, 1])[0]["bytes"] == {"p2p": 6, "exchange": 0, "gather": 30, "reduce": 0}
    path = tmp_path / "metrics.jsonl"
    first, *others = map(json.loads, path.read_text().splitlines())
    del first["bytes"]
    path.write_text("\n".join(map(json.dumps, [first, *others])) + "\n")
    assert summarise(tmp_path, WORLD, Peak(1e9, "measured"), 5.0, {})["bytes"] is None
