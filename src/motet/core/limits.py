"""The largest sizes of a model that are taken at all.

Each is above any model that there is, and below what would fill a machine before a mistyped number is noticed.
"""

MAX_LAYERS = 1024
MAX_WIDTH = 2**17
MAX_MLP = 2**20
MAX_HEADS = 2**12
MAX_VOCABULARY = 2**24
MAX_JOINED = 1024
"""Rows that a projector joins to one."""
