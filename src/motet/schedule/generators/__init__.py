"""Generators: the compute actions of a Program, a schedule a file. Its words: docs/glossary.md."""
