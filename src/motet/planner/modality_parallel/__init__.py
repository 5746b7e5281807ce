"""The strategy Cornstarch: modules beside each other (sections 4.1 and 4.2). Its words: docs/glossary.md."""
