"""Joins the parts into a training job: recipe, input, trainer, checkpoints, evaluation, report. Its words: docs/glossary.md."""
