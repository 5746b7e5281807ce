"""Joins every layer into a training job: recipe, feed, step, checkpoints, metrics, evaluation, report.

The words are in docs/glossary.md.
"""
