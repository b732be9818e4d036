"""The one exception for input that a user can mend; programs print its line and exit with 2."""


class InputError(ValueError):
    """Bad input: one line that names the thing, says what is wrong and what to do."""
