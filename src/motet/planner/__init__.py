"""What runs where, decided once a job: how layers are cut into stages."""

from motet.planner.partition import partition

__all__ = ["partition"]
