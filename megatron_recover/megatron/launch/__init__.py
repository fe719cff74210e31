"""Checks of a command line before any rank starts."""
