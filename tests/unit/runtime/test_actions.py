from itertools import combinations

from motet.core.workload import BACKBONE
from motet.runtime.actions import microbatch_actions
from motet.schedule.program import Kind

EVERYTHING = ["image", "audio", BACKBONE]


def named(present, trainable) -> list[str]:
    return [str(action) for action in microbatch_actions(["image", "audio"], present, trainable)]


def test_full_sequence():
    assert named(EVERYTHING, EVERYTHING) == [
        "forward image",
        "exchange image",
        "forward audio",
        "exchange audio",
        "forward backbone",
        "backward backbone",
        "exchange gradients audio",
        "backward audio",
        "exchange gradients image",
        "backward image",
    ]


def test_actions_are_of_the_kinds_of_a_program():
    actions = microbatch_actions(["image"], ["image", BACKBONE], ["image"])
    assert [action.kind.of_program for action in actions] == [
        Kind.F, Kind.EXCHANGE_F, Kind.F, Kind.B, Kind.EXCHANGE_B, Kind.B
    ]  # fmt: skip


def test_absent_phase_is_left_out():
    assert named(["audio", BACKBONE], EVERYTHING) == [
        "forward audio",
        "exchange audio",
        "forward backbone",
        "backward backbone",
        "exchange gradients audio",
        "backward audio",
    ]
    assert named([BACKBONE], EVERYTHING) == ["forward backbone", "backward backbone"]
    assert named([], EVERYTHING) == []


def test_gradients_pass_a_frozen_backbone_to_what_learns_before_it():
    assert named(EVERYTHING, ["image"])[-3:] == ["backward backbone", "exchange gradients image", "backward image"]


def test_no_backward_pass_where_nothing_present_learns():
    assert named(["audio", BACKBONE], ["image"])[-1] == "forward backbone"


def test_every_backward_has_its_forward():
    for size in range(4):
        for trainable in combinations(EVERYTHING, size):
            actions = named(EVERYTHING, trainable)
            assert len(set(actions)) == len(actions)
            assert all(name.replace("backward", "forward") in actions for name in actions)
