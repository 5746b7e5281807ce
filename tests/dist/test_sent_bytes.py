"""Bytes by kind that a step under a Plan says it has sent: those that torch's messages and collectives were given."""

import pytest
import torch
import torch.distributed as dist

from motet.core.plan import Unit
from motet.runtime.sharded_state import SAME_TYPES
from parity.collectives import counted_collectives, on_all_ranks
from parity.planned import PlannedCase, StagesRun, build_hf_model, run_of
from parity.test_tensor_parallel_plans import cut_in_bubbles
from ranks import run_ranks
from tiers import in_tiers

CUT = ({"image": 3, "audio": 2, "backbone": 1}, {"backbone": 2})
WHOLE = ({"image": 3, "audio": 2, "backbone": 3},)
CASES = {
    2: [
        PlannedCase((Unit("all", CUT, pp=2, zero=0),), tied=True),
        *(PlannedCase((Unit("all", WHOLE, dp=2, zero=zero),)) for zero in range(4)),
        PlannedCase((Unit("all", WHOLE, tp=2, zero=0, recompute=({"image": 2, "backbone": 2},)),)),
        PlannedCase((Unit("llm", ({"audio": 2, "backbone": 3},), tp=2, zero=0), Unit("image", ({"image": 3},), dp=2))),
        PlannedCase((Unit("all", WHOLE, tp=2, zero=0),), family="gpt2", chunks=2),
    ],
    4: [
        PlannedCase((Unit("all", CUT, pp=2, dp=2, zero=3),)),
        PlannedCase((Unit("all", WHOLE, dp=4, zero=2, shard_size=2),), batch_size=8),
        PlannedCase(
            (
                Unit("llm", ({"audio": 2, "backbone": 1}, {"backbone": 2}), pp=2, dp=2),
                Unit("image", ({"image": 3},), dp=4, zero=3, shard_size=2),
            ),
            batch_size=8,
        ),
        *(PlannedCase((Unit("all", WHOLE, dp=2, tp=2, zero=zero),), "data_parallel") for zero in (0, 3)),
        *(
            PlannedCase((Unit("all", WHOLE, dp=4, ep=2, zero=zero),), "data_parallel", family="mixtral", batch_size=8)
            for zero in (0, 3)
        ),
    ],
}


def counted(rank, num_ranks, cases):
    """Of two steps of each case, (what the step says, what was counted). What is held out comes before the first."""
    found = []
    for case in cases:
        run, model = run_of(case, torch.float64, SAME_TYPES), build_hf_model(case.frozen, case.tied)
        batches, steps, mesh = run.batches(0, model), [], run.step.mesh
        sharing = [mesh.tensor.group] if mesh.tensor else [], mesh.experts and mesh.experts.group
        if isinstance(run, StagesRun):
            run.step.evaluate(batches)
            groups = run.step.groups
            sharing = [*groups.tensor.values(), *groups.gathered.values()], groups.experts
        for number in range(2):
            with counted_collectives(*sharing) as sent:
                result = run.step.run(batches, number)
            steps.append((result.sent_bytes, on_all_ranks(sent)))
            assert result.moved_bytes == result.sent_bytes["p2p"]
        found.append(steps)
        dist.barrier()
    return found


@pytest.mark.parametrize(("num_ranks", "cases"), in_tiers(CASES, {2: (0, 5, 6)}))
def test_a_step_counts_what_collectives_were_given(num_ranks, cases):
    of_ranks = run_ranks(counted, num_ranks, cases)
    for case, *found in zip(cases, *of_ranks, strict=True):
        unit, *in_bubbles = case.units
        for steps in found:
            for number, (said, given) in enumerate(steps):
                assert said == given, case
                assert bool(said["exchange"]) == (unit.tp > 1 or unit.ep > 1)
                assert bool(said["p2p"]) == (unit.pp > 1)
                if in_bubbles:
                    continue  # With rows that come together, and gradients of what each rank holds.
                # The held-out pass has gathered what the first step computes with, but under ZeRO 3.
                assert bool(said["gather"]) == (unit.zero == 3 or (unit.zero > 0 and number > 0))
                assert bool(said["reduce"]) == (unit.num_ranks > unit.tp)


@pytest.mark.slow
@pytest.mark.parametrize("seed", [7, 13])
def test_passes_that_are_cut_send_as_much_as_whole_ones(seed):
    """Parts of rows stay in parts between the blocks, or halves of blocks, of encoders in bubbles."""
    whole, cut = (cut_in_bubbles(one, contents=("image",)) for one in (-1, seed))
    assert cut.plan().fills != whole.plan().fills
    (of_whole, of_cut), _ = run_ranks(counted, 2, [whole, cut])
    assert [said["exchange"] for said, _ in of_cut] == [said["exchange"] for said, _ in of_whole]
