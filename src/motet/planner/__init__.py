"""What runs where, decided once a job: how layers are cut into stages. Its words: docs/glossary.md."""

from motet.planner.stages.partition import partition

__all__ = ["partition"]
