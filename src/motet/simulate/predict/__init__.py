"""A Plan, lengths and a cost model into a Prediction. Its words: docs/glossary.md."""
