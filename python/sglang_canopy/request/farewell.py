"""Whether a person says thanks or takes leave: what comes back after that comes back less often.

English, since that is where it was measured (``benchmark/eviction/people.py``). The text is looked
at and forgotten; what stays is the category.
"""

from __future__ import annotations

import re
from typing import Any

FLAG = "--canopy-infer-farewells"
ATTRIBUTE = "_canopy_infer_farewells"
"""Where the plugin notes the flag's value on ``ServerArgs``."""
SUFFIX = "-farewell"
_LAST = 2000
"""Characters looked at, from the end: who pastes a document says thanks before or behind it."""
_WORDS = re.compile(
    r"\b(thanks?|thank you|thx|bye|goodbye|good ?night|see (you|ya)|ttyl|take care|gotta go|"
    r"have to go|(nice|good|great|lovely) (talking|chatting|meeting)|have a (good|great|nice))\b",
    re.IGNORECASE,
)


def is_farewell(text: str) -> bool:
    """Whether ``text``, a person's message, thanks or takes leave."""
    return _WORDS.search(text, max(0, len(text) - _LAST)) is not None


def text_of(message: Any) -> str:
    """The text of a chat message, as SGLang has parsed it."""
    content = getattr(message, "content", None)
    if isinstance(content, str):
        return content
    parts = content if isinstance(content, list) else []
    texts = (getattr(part, "text", None) for part in parts)
    return "\n".join(text for text in texts if isinstance(text, str))
