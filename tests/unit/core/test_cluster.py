"""Groups of ranks, by how they lie on nodes."""

from itertools import pairwise

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from motet.core.cluster import Cluster, Device, Link

GPU = Device("gpu", {"bf16": 1e15}, memory_bytes=80 * 10**9, memory_bytes_per_s=3e12)


@given(st.integers(0, 9), st.integers(1, 9), st.integers(1, 6), st.integers(1, 9), st.integers(1, 7))
def test_every_group_lies_on_nodes_as_one_of_the_unlike_ones(first, num_blocks, size, apart, per_node):
    ranks = range(first, first + num_blocks * size * apart)
    cluster = Cluster(GPU, -(-ranks.stop // per_node), per_node, Link(450e9, 3e-6), Link(50e9, 14e-6))
    kinds = {}
    for group in np.array(ranks).reshape(-1, size, apart).swapaxes(1, 2).reshape(-1, size).tolist():
        leaves_node = tuple(one // per_node != other // per_node for one, other in pairwise(group))
        kinds.setdefault(leaves_node, tuple(group))
    assert list(map(tuple, cluster.unlike(ranks, size, apart=apart))) == list(kinds.values())
