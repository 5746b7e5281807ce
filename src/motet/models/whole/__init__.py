"""Whole models: a directory of transformers as the parts that Motet trains, and back."""
