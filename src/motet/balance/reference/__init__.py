"""The balancing algorithms as readable Python, one a file: what the native core must do."""

from motet.balance.reference.bound import packed_bound
from motet.balance.reference.home import packed_home
from motet.balance.reference.joint import joint
from motet.balance.reference.joint_home import joint_home
from motet.balance.reference.nodes import place_on_nodes
from motet.balance.reference.packed import packed
from motet.balance.reference.padded import padded, padded_bound

__all__ = ["joint", "joint_home", "packed", "packed_bound", "packed_home", "padded", "padded_bound", "place_on_nodes"]
