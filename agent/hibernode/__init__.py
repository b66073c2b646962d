"""Hibernode: a per-node agent that freezes warmed-up workers and thaws them in seconds."""

__version__ = "0.1.0"
