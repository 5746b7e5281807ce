"""The strategy OrchMLLM: every module on every rank. Its words: docs/glossary.md."""
