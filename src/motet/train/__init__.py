"""A training job: recipe, input, trainer, checkpoints, reports. The words are in docs/glossary.md."""
