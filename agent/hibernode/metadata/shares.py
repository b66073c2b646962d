"""What callers share, so that none can take all of it: requests, watches, bytes."""

from __future__ import annotations

from collections import Counter
from typing import Final

from hibernode.errors import TooLargeError

LARGEST: Final = 8
"""Largest requests whose bytes may be under way at one time; two of them for one caller."""


class Share:
    """``most`` in all, and a quarter of it for one caller; a caller who holds nothing gets what is left.

    :param what: its name, for the sentence.
    """

    def __init__(self, most: int, what: str) -> None:
        self._most, self._what = most, what
        self._held = Counter[str]()
        self.total = 0

    def of(self, key: str) -> int:
        """Tell what a caller holds."""
        return self._held[key]

    def take(self, key: str, amount: int = 1) -> None:
        """Give a caller this much more.

        :raises TooLargeError: ``TooMuchAtOnce``.
        """
        held = self._held[key]
        if self.total + amount > self._most or (held and held + amount > self._most // 4):
            raise TooLargeError(
                f"too many {self._what} at one time", remedy="try again later", reason="TooMuchAtOnce"
            )
        self._held[key] += amount
        self.total += amount

    def give(self, key: str, amount: int = 1) -> None:
        """Take it back."""
        self.total -= amount
        self._held[key] -= amount
        if not self._held[key]:
            del self._held[key]
