"""The strategy MMScale: units of their own. Its words: docs/glossary.md."""
