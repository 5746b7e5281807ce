"""Generators: each makes the compute actions of a Program in one schedule. Words: docs/glossary.md."""
