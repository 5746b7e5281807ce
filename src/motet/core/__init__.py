"""Plain, immutable, serialisable data that every other package reads. Free of torch. Its words: docs/glossary.md."""
