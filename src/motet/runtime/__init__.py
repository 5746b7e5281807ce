"""Sharding of a model over ranks, and the execution of a training step as named actions.

The words are in docs/glossary.md.
"""
