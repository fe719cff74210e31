"""The judgement of a command line before any rank starts."""
