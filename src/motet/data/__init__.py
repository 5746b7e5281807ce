"""The tokens and media of every example of a manifest: readers, the length index, text, transforms, order, decoding.

Lengths come from an index of file headers, so that work is balanced before anything is decoded. Worker processes decode
the media. Nothing here imports torch, and this file imports nothing: worker processes stay small and start fast.

The words are in docs/glossary.md.
"""
