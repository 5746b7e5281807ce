"""One multimodal model from independent modules: HF models, or any nn.Module that fulfils a small contract.

The words are in docs/glossary.md.
"""
