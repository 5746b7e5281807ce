"""Whether a Plan fits, and the proof that a Program can be executed. Its words: docs/glossary.md."""
