"""The balancing algorithms as readable Python, one in each file. The native core must give the same results."""

from motet.balance.reference.bound import packed_bound
from motet.balance.reference.grouping import isf
from motet.balance.reference.home import packed_home
from motet.balance.reference.joint import joint
from motet.balance.reference.joint_home import joint_home
from motet.balance.reference.nodes import place_on_nodes
from motet.balance.reference.packed import packed
from motet.balance.reference.padded import padded, padded_bound
from motet.balance.reference.padded_attention import padded_attention
from motet.balance.reference.reordering import island_makespans, order_islands
from motet.balance.reference.splitting import pour
from motet.balance.reference.tokens import block_pairs

__all__ = [
    "block_pairs",
    "isf",
    "island_makespans",
    "joint",
    "joint_home",
    "order_islands",
    "packed",
    "packed_bound",
    "packed_home",
    "padded",
    "padded_attention",
    "padded_bound",
    "place_on_nodes",
    "pour",
]
