"""The exception for mistakes that a user can correct."""


class LmgymError(Exception):
    """A mistake that the user can correct; the message is one clear sentence.

    It names the file, line or key and says what would be right. The command line prints it without a traceback and
    exits with status 1; in Python it is an ordinary exception.

    Example: raise LmgymError("lmgym/recipes/a.yaml: unknown key 'stepz'; did you mean 'steps'?")
    """
