"""Text that others chose, made harmless before a terminal or a log shows it."""

from __future__ import annotations


def printable(text: str, keep: str = "\t") -> str:
    """Show control characters, and others that have no glyph, as escapes; those in ``keep`` stay."""
    if text.isprintable():
        return text
    return "".join(char if char.isprintable() or char in keep else repr(char)[1:-1] for char in text)
