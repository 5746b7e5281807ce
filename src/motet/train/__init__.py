"""Joins the parts into a training job: recipe, input, trainer, checkpoints, reports. Its words: docs/glossary.md."""
