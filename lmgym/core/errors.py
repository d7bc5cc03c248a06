"""The one exception that a user is meant to read."""


class LmgymError(Exception):
    """Something the user can mend; the message is one clear sentence.

    It names the file, line or key at fault and says what would be right. The command line prints it
    without a traceback and exits with status 1; from Python it is an ordinary exception.

    Example:
        >>> raise LmgymError("lmgym/recipes/a.yaml: unknown key 'stepz'; did you mean 'steps'?")
        Traceback (most recent call last):
        lmgym.core.errors.LmgymError: lmgym/recipes/a.yaml: unknown key 'stepz'; did you mean 'steps'?
    """
