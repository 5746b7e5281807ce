"""Timelines and Predictions as tables, pages and pictures. Words: docs/glossary.md."""
