"""Mistakes of the user, as opposed to errors in this code: they end a command with one sentence and no traceback."""


class UserError(Exception):
    """A mistake that the user can correct. The message is one sentence: the rule, the numbers and the fix."""


def require(condition, message: str):
    """Raise UserError(message) unless the condition holds."""
    if not condition:
        raise UserError(message)
