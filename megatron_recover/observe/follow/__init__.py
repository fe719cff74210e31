"""Reading of a trace while its run lasts."""
