"""Timelines and Predictions as tables, pages and pictures. Its words: docs/glossary.md."""
