"""From a manifest to the tokens and media of any example: readers, the length index, text, transforms, order, decoding.

Lengths come from an index built from file headers, so that work is balanced before anything is decoded; media are
decoded in worker processes. Free of torch throughout, and this file imports nothing: worker processes stay small and
start fast.

The words are in docs/glossary.md.
"""
