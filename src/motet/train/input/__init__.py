"""Reads the examples of each step, decides on them, loads and exchanges them. The words are in docs/glossary.md."""
