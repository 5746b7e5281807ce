"""Independent modules (HF models, or any nn.Module that fulfils one small contract) made into one multimodal model.

The words are in docs/glossary.md.
"""
