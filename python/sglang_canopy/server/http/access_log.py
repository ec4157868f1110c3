"""Uvicorn's access log without the queries of Canopy's routes, which contain tenants."""

from __future__ import annotations

import logging

_ROUTES = "/canopy/"
_PATH = 2
"""Index of the path and query in the arguments of uvicorn's access records."""


class WithoutQuery(logging.Filter):
    """Remove the query from records of Canopy's routes; accept every record."""

    def filter(self, record: logging.LogRecord) -> bool:
        arguments = record.args
        if isinstance(arguments, tuple) and len(arguments) > _PATH:
            path, _, query = str(arguments[_PATH]).partition("?")
            if query and _ROUTES in path:
                record.args = (*arguments[:_PATH], path, *arguments[_PATH + 1 :])
        return True


def hide_queries() -> None:
    """Install the filter in this process. Uvicorn's logging set-up keeps it."""
    logger = logging.getLogger("uvicorn.access")
    if not any(isinstance(one, WithoutQuery) for one in logger.filters):
        logger.addFilter(WithoutQuery())
