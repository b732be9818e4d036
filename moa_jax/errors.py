"""The exception for input that a user can fix; programs print its message and exit with 2."""


class InputError(ValueError):
    """Invalid input; the message is one line: the value, what is wrong with it, and the fix."""


def first_line(error: BaseException) -> str:
    """Returns the first line of an error's message, or the error's type if the message is empty."""
    return (str(error).strip() or type(error).__name__).splitlines()[0]
