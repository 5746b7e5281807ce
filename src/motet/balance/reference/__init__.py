"""The balancing algorithms as readable Python, one a file: what the native core must do."""

from motet.balance.reference.bound import packed_bound
from motet.balance.reference.joint import joint
from motet.balance.reference.packed import packed
from motet.balance.reference.padded import padded, padded_bound
from motet.balance.reference.splitting import pour

__all__ = ["joint", "packed", "packed_bound", "padded", "padded_bound", "pour"]
