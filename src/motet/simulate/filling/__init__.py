"""Bubbles filled by step: which encoder pipeline takes which microbatch, and before which action of the backbone."""
