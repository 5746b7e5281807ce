"""The recipe: one validated TOML file. Its words: docs/glossary.md."""
