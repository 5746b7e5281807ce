"""What a piece of a module costs on given lengths. Free of torch. Its words: docs/glossary.md."""
