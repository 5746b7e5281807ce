"""The strategy Optimus: encoders in the bubbles of the backbone. Its words: docs/glossary.md."""
