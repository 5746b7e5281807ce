"""Exchanges stand right after the pass that makes what moves, and right before the one that needs its gradient."""

import pytest

from motet.core.errors import ArgumentError
from motet.schedule import add_exchanges, data_parallel, split_parts, validate

LEARNS = {"image": True, "audio": False, "backbone": True}


def row(program):
    return " ".join(map(str, program.actions[0]))


def test_each_encoders_output_moves_and_its_gradient_moves_back():
    program = add_exchanges(data_parallel(LEARNS, 2, 1))
    assert row(program) == "0F0 0EXCHANGE_F0>2 1F0 1EXCHANGE_F0>2 2F0 2B0 0EXCHANGE_B0>2 0B0 2NORM 2STEP"
    validate(program)


def test_only_named_modules_exchange():
    assert (
        row(add_exchanges(data_parallel(LEARNS, 2, 1), ["audio"])) == "0F0 1F0 1EXCHANGE_F0>2 2F0 2B0 0B0 2NORM 2STEP"
    )
    assert add_exchanges(data_parallel(LEARNS, 2, 1), ()) == data_parallel(LEARNS, 2, 1)


def test_parts_and_exchanges_may_be_added_in_either_order():
    program = data_parallel(LEARNS, 2, 2)
    assert add_exchanges(split_parts(program, 0, 2, 3)) == split_parts(add_exchanges(program), 0, 2, 3)


def test_a_rank_alone_exchanges_nothing():
    assert add_exchanges(data_parallel(LEARNS, 1, 2)) == data_parallel(LEARNS, 1, 2)


def test_what_feeds_nothing_cannot_be_exchanged():
    with pytest.raises(ArgumentError, match="'backbone' feeds no module; image, audio do"):
        add_exchanges(data_parallel(LEARNS, 2, 1), ["backbone"])
