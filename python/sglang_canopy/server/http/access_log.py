"""Uvicorn's access log, without the queries of Canopy's routes: they name tenants."""

from __future__ import annotations

import logging

_ROUTES = "/canopy/"
_PATH = 2
"""Place of the path, with its query, in the arguments of uvicorn's access records."""


class WithoutQuery(logging.Filter):
    """Lets every record pass; one of a Canopy route loses its query."""

    def filter(self, record: logging.LogRecord) -> bool:
        arguments = record.args
        if isinstance(arguments, tuple) and len(arguments) > _PATH:
            path, _, query = str(arguments[_PATH]).partition("?")
            if query and _ROUTES in path:
                record.args = (*arguments[:_PATH], path, *arguments[_PATH + 1 :])
        return True


def hide_queries() -> None:
    """Install the filter in this process. Uvicorn's own set-up of its loggers leaves it there."""
    logger = logging.getLogger("uvicorn.access")
    if not any(isinstance(one, WithoutQuery) for one in logger.filters):
        logger.addFilter(WithoutQuery())
