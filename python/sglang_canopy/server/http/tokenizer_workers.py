"""Select the HTTP application of several tokenizer workers by SGLang's environment variable."""

from __future__ import annotations

import os
from typing import Any

from sglang_canopy.config.setups import HTTP_APPS

VARIABLE = "SGLANG_HTTP_SERVER_APP_PATH"
SGLANGS, OURS = HTTP_APPS


def use_our_application(server_args: Any) -> None:
    """Let the workers import ``http_worker``, unless the operator has set an application."""
    workers = getattr(server_args, "tokenizer_worker_num", None) or 1
    if workers > 1 and os.environ.get(VARIABLE) in (None, "", SGLANGS):
        os.environ[VARIABLE] = OURS
