"""The demonstration dataset: handwritten digits as images, digits as speech in several languages, and text.

Everything is made from what two small packages hold (scikit-learn's digits, ttspico's voices), so nothing is
downloaded, and from one seed, so that the same call writes the same bytes. Free of torch.
"""

from motet.demo.write import DEFAULT_NUM_HELDOUT, DEFAULT_NUM_TRAIN, write_demo_data

__all__ = ["DEFAULT_NUM_HELDOUT", "DEFAULT_NUM_TRAIN", "write_demo_data"]
