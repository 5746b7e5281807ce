"""Motet: trains multimodal LLMs on PyTorch without the idle time that heterogeneous data and modules cause.

Importing `motet` or its torch-free half (`core`, `cost`, `balance`) never imports torch.
"""

__version__ = "0.1.0"
