"""A chain of blocks cut into stages: memory, recomputation and step time of a cut. Its words: docs/glossary.md."""
