"""A Program and the times of its actions into a Timeline. Its words: docs/glossary.md."""
