from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from torch import nn

from motet.core.errors import UserError
from motet.runtime.fsdp import FSDPConfig, shard
from motet.runtime.mesh import build_mesh
from ranks import run_ranks


def shapes(rank: int, num_ranks: int) -> list:
    meshes = [build_mesh(torch.device("cpu"), shard_size=size) for size in (None, num_ranks, 2, 1)]
    with pytest.raises(UserError, match="shard_size is 3, but must divide the number of ranks, which is 4"):
        build_mesh(torch.device("cpu"), shard_size=3)
    with pytest.raises(UserError, match="tp is 3, but must divide the number of ranks, which is 4"):
        build_mesh(torch.device("cpu"), tensor_size=3)
    divided = build_mesh(torch.device("cpu"), tensor_size=2)
    assert (divided.tensor.index, divided.tensor_size) == (rank % 2, 2)
    assert divided.cuts.mesh.tolist() == [[0, 2], [1, 3]]
    meshes.append(divided)
    for size, expert_size, of_experts in (
        (None, 2, [[0, 2], [1, 3]]),
        (1, 2, [[[0], [2]], [[1], [3]]]),
        (2, 4, [[0], [1], [2], [3]]),
    ):
        spread = build_mesh(torch.device("cpu"), shard_size=size, expert_size=expert_size)
        assert (spread.experts.index, spread.expert_size, spread.num_ranks) == (rank % expert_size, expert_size, 4)
        assert spread.expert_cuts.mesh.tolist() == of_experts
    with pytest.raises(UserError, match="ep is 3, but must divide the number of ranks, which is 4"):
        build_mesh(torch.device("cpu"), expert_size=3)
    both = build_mesh(torch.device("cpu"), tensor_size=2, expert_size=2)
    assert both.cuts.mesh.tolist() == [[0, 2], [1, 3]] and both.expert_cuts.mesh.tolist() == [[0], [1], [2], [3]]
    assert dist.get_process_group_ranks(both.experts.group) == [rank % 2, rank % 2 + 2]
    return [(m.shards.mesh_dim_names, m.shards.shape, m.is_hybrid, m.rank, m.num_ranks) for m in meshes]


def test_shapes_of_meshes():
    for rank, found in enumerate(run_ranks(shapes, 4)):
        assert found == [
            (("shard",), (4,), False, rank, 4),
            (("shard",), (4,), False, rank, 4),
            (("replicate", "shard"), (2, 2), True, rank, 4),
            (("replicate", "shard"), (4, 1), True, rank, 4),
            (("shard",), (2,), False, rank // 2, 2),
        ]


class NoBlocks(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.encoders = nn.ModuleDict()
        self.backbone = nn.Linear(2, 2)


def test_recomputation_without_blocks_is_refused():
    with pytest.raises(UserError, match="module 'backbone' names no blocks that can be recomputed"):
        shard(NoBlocks(), None, FSDPConfig(recompute=True))


def test_a_number_without_a_dimension_is_not_shared_out():
    model = NoBlocks()
    model.backbone.gate = nn.Parameter(torch.tensor(0.5))
    with pytest.raises(UserError, match="The weight gate of 'backbone' is a number without a dimension"):
        shard(model, SimpleNamespace(is_sharded=True, is_divided=False), FSDPConfig())
    shard(model, SimpleNamespace(is_sharded=False, is_divided=False, shard_size=1), FSDPConfig(shard_size=1))


@pytest.mark.parametrize(("stated", "built"), [(1, 4), (4, 2)])
def test_a_mesh_of_other_shards_than_are_stated_is_refused(stated, built):
    with pytest.raises(ValueError, match=rf"shard_size is {stated}, but the mesh is one of {built}"):
        shard(NoBlocks(), SimpleNamespace(shard_size=built), FSDPConfig(shard_size=stated))


@pytest.mark.parametrize(
    ("recompute", "said"),
    [
        ({"bakbone": 1}, "there is no module 'bakbone'; the model has backbone"),
        ({"backbone": 1}, "fsdp.recompute.backbone is 1, but 'backbone' has 0 blocks"),
    ],
)
def test_a_table_of_recomputation_that_does_not_fit_is_refused(recompute, said):
    with pytest.raises(UserError, match=said):
        shard(NoBlocks(), None, FSDPConfig(recompute=recompute))
