"""The exception for input that a user can fix; programs print its line and exit with 2."""


class InputError(ValueError):
    """Bad input: one line that names the thing, says what is wrong and what to do."""


def first_line(error: BaseException) -> str:
    """The first line of an error; its name where it says nothing."""
    return (str(error).strip() or type(error).__name__).splitlines()[0]
