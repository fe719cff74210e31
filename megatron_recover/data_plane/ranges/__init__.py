"""Reading ranges of a memory that another rank has registered: the state of a newcomer."""
