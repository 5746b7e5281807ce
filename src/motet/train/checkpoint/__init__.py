"""Checkpoints: saved in the background, whole or not there, verified before use, resharded when they are read.

contents.py says what a checkpoint consists of, and verifies it. folder.py names, renames and removes the checkpoints of
a run. command.py is `motet checkpoints`. These three need no torch. state.py names the tensors; storage.py writes and
reads them for torch DCP; saving.py and restoring.py save and restore a job. choice.py selects the checkpoint from which
a run resumes.
"""
