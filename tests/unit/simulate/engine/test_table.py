"""A Program as columns of int32."""

from dataclasses import replace

import pytest

from motet.core.errors import ArgumentError
from motet.schedule import add_communication, one_f_one_b
from motet.schedule.passes.communication import place_messages
from motet.simulate.engine.table import action_table


@pytest.mark.parametrize("microbatch", [2**32, 2**31, 2**70])
def test_a_number_past_int32_is_refused_where_it_would_come_round_to_another(microbatch):
    program = one_f_one_b(2, 2)
    first, *others = program.actions[0]
    odd = replace(program, actions=((first._replace(microbatch=microbatch), *others), program.actions[1]))
    with pytest.raises(ArgumentError, match="no int32 holds"):
        action_table(odd)
    assert add_communication(odd) == place_messages(odd)
