"""Plain, immutable, serialisable data that every other layer reads. Free of torch. Its words: docs/glossary.md."""
