"""The strategy of one chain of stages. Its words: docs/glossary.md."""
