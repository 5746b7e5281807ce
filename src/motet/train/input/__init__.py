"""The examples of each step: read, decided, loaded and exchanged. Its words: docs/glossary.md."""
