"""The exception for a user's mistake, such as a wrong flag, and a helper to write its message.

The command prints the message, which is one sentence, and no traceback.
"""


class UserError(Exception):
    """A mistake that the user can correct. The message is one sentence with the rule, the numbers and the fix.

    For example: "num-attention-heads 6 must be divisible by tensor-model-parallel-size 4; try --tp 1, 2, 3, 6".
    """


def require(condition, message: str):
    """Raise UserError(message) unless the condition holds."""
    if not condition:
        raise UserError(message)


def counted(number: int, noun: str, form="") -> str:
    """Return for example "1 replica", "2 processes" or, with the format ",", "1,000 tokens"."""
    return f"{number:{form}} {noun}" + ("" if number == 1 else "es" if noun.endswith(("s", "ch")) else "s")
