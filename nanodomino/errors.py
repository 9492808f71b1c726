

class UserError(Exception):
    """A mistake that whoever started the run can mend: one sentence with the rule, the numbers and the fix."""


def require(condition, message: str):
    """Raise UserError(message) unless the condition holds."""
    if not condition:
        raise UserError(message)
