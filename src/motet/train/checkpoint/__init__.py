"""Checkpoints: saved in the background, whole or not there, verified before use, resharded when they are read.

contents.py says what a checkpoint consists of, and whether it is whole; folder.py, what may happen to those of one run;
command.py is `motet checkpoints`. These run without torch. storage.py is what torch DCP writes to and reads from;
state.py, the tensors by name; saving.py and restoring.py write them and put them back; choice.py says which checkpoint
a run goes on from.
"""
