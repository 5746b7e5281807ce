"""A recipe as a job to be planned, and as a Plan. Its words: docs/glossary.md."""
