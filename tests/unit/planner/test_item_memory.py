"""Item by item, a rank needs what the memory model says of an example alone, whole and shared."""

import numpy as np
import pytest

from motet.balance.splitting import Overhead, split
from motet.core.plan import Unit
from motet.cost.memory import USABLE_MEMORY
from motet.planner.alone import bytes_alone
from motet.planner.item_memory import RankMemory
from unit.planner.test_alone import DEVICE, MERGED, MODEL, WHOLE, lengths_of, plan_of


@pytest.mark.parametrize("model", [MODEL, MERGED], ids=["dealt out", "merged whole"])
@pytest.mark.parametrize("recompute", [(), ({"backbone": 3, "image": 2},)])
@pytest.mark.parametrize(("sequence", "image"), [(900, 0), (300, 4000)])
def test_an_item_takes_what_its_example_takes_alone(model, recompute, sequence, image):
    plan = plan_of(Unit("all", (WHOLE,), dp=4, zero=2, recompute=recompute), "data_parallel", "auto", model)
    lengths = lengths_of([sequence], [[image] if image else []])
    memory = RankMemory(plan)
    fixed = int(DEVICE.memory_bytes * USABLE_MEMORY) - memory.room_bytes
    of_phases = memory(lengths)
    whole = max(int(of_phases[name].alone.max(initial=0)) for name in ("backbone", "image"))
    assert fixed + whole == pytest.approx(bytes_alone(plan, lengths)[0], rel=1e-6)
    # A fourth of what is largest, which the others share.
    name = "image" if image else "backbone"
    one, units = np.zeros(1, dtype=np.int64), np.array([4])
    kept, working = of_phases[name].of_fragments(one, units // 4, units)
    needed, merged = int(kept[0] + working.max()), of_phases[name].whole
    if merged is not None:
        needed = int(kept[0] + merged.kept[0] + max(working.max(), merged.working.max()))
    shared = bytes_alone(plan, lengths, shared_by={name: 4, "backbone": 4}, exchange="group_cast")[0]
    assert (merged is not None) == (model.merges and name == "backbone")
    assert fixed + needed == pytest.approx(shared, rel=1e-4)


def test_overhead_of_a_cut_covers_copies():
    plan = plan_of(Unit("all", (WHOLE,), dp=4, zero=0), "data_parallel", "auto")
    taken = RankMemory(plan)(lengths_of([4000], [[]]))["backbone"]
    cut = split(taken.alone, 4, Overhead(fraction=taken.copied_share), divisible=np.array([500]))
    kept, working = taken.of_fragments(cut.item, cut.end - cut.begin, cut.units[cut.item])
    assert 0 < taken.copied_share < 1 and (cut.costs >= kept + working.max(axis=1)).all()
