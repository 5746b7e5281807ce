"""What a run did: metrics, summary and page. Its words: docs/glossary.md."""
