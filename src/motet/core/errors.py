"""The exceptions that mean: the input is wrong, not the program."""


class UserError(Exception):
    """Wrong input by the user. Its text is one sentence: what is wrong, where, and what would be right.

    The command line prints the sentence and exits with code 2; no traceback is shown.
    """


class ArgumentError(UserError, ValueError):
    """A wrong argument to a function of the library: a ValueError to who writes Python, a sentence to who does not."""
