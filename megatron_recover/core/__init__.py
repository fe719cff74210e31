"""The protocol as pure state machines over frozen values."""
