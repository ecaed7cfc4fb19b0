"""The one exception for bad input: a message that a user can act on."""


class UserError(ValueError):
    """Bad input. The message is one line: what is wrong, where, the limit, and what to change.

    The command line prints it and exits with status 2; nothing has been written when it is raised.
    """
