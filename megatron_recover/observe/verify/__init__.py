"""The invariants as rules over a trace, a file an invariant. INV-9 needs more than a trace and is not here."""
