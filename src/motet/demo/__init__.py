"""The demonstration dataset: handwritten digits as images, digits as speech in several languages, and text.

Everything is made from what two small packages hold (scikit-learn's digits, ttspico's voices), so nothing is
downloaded, and from one seed, so that the same call writes the same bytes. Free of torch.

The words are in docs/glossary.md.
"""

from motet.demo.write import write_demo_data

__all__ = ["write_demo_data"]
