"""Inputs with their verdicts, and what runs them, for `bad_inputs.py`."""
