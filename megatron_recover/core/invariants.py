class InvariantViolation(Exception):
    pass
