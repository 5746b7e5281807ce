"""The demonstration dataset: handwritten digits as images, digits as speech in several languages, and text.

The digits come from scikit-learn and the voices from ttspico, two small packages, so nothing is downloaded. All random
draws come from one seed, so the same call writes the same bytes. It does not import torch.

The words are in docs/glossary.md.
"""

from motet.demo.drawing import write_drawing_data
from motet.demo.judge import Judge
from motet.demo.write import write_demo_data

__all__ = ["Judge", "write_demo_data", "write_drawing_data"]
