"""motet profile: layers, messages and the optimizer timed on this machine. Its words: docs/glossary.md."""
