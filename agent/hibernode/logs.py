"""What the agent prints: lines for people, or JSON for collectors."""

from __future__ import annotations

import json
import logging
import sys
from datetime import UTC, datetime
from typing import Any

from hibernode.settings import LogSettings
from hibernode.text import printable


class JsonFormatter(logging.Formatter):
    """One JSON object a line: time (RFC 3339 UTC), level, logger, message, and the traceback if any."""

    def format(self, record: logging.LogRecord) -> str:
        """Render one record."""
        line: dict[str, Any] = {
            "time": datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds"),
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
        }
        if record.exc_info:
            line["traceback"] = self.formatException(record.exc_info)
        return json.dumps(line, ensure_ascii=False)


class TextFormatter(logging.Formatter):
    """A line for people: a hostile name can neither steer the terminal nor begin a line of its own."""

    def formatMessage(self, record: logging.LogRecord) -> str:  # noqa: N802 - the library's name
        """Render the message as one line."""
        record.message = printable("; ".join(line.strip() for line in record.message.split("\n")))
        return super().formatMessage(record)

    def formatException(self, ei: Any) -> str:  # noqa: N802 - likewise
        """Render a traceback, which has lines."""
        return printable(super().formatException(ei), keep="\t\n")


def configure(settings: LogSettings) -> None:
    """Send the log to standard error in the form and from the level that the settings name."""
    handler = logging.StreamHandler(sys.stderr)
    if settings.format == "json":
        handler.setFormatter(JsonFormatter())
    else:
        handler.setFormatter(TextFormatter("%(asctime)s %(levelname)-7s %(name)s: %(message)s"))
    logging.basicConfig(level=settings.level.upper(), handlers=[handler], force=True)
