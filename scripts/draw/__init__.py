"""Draws pictures and tables of docs/ from the code."""
