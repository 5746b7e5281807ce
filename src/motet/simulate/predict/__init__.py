"""A Plan, lengths and a cost model into a Prediction. Words: docs/glossary.md."""
