"""Pictures and tables of docs/, drawn from the code."""
