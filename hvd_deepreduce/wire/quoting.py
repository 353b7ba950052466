"""Texts and values that others gave (another rank, a file), for error messages."""

from __future__ import annotations

import json
import re

MAX_CHARACTERS = 160
"""Of a text or value in a message."""
_PLAIN = re.compile(r"[\w.+-]+( \[[\d, -]*\])?", re.ASCII)


def quoted(value: object) -> str:
    """A value as it is shown in a message.

    One word (a name, a release), or one with a shape, is shown as it is; any other text as its ``repr``, so that it
    cannot pass for a part of the message. Other values of JSON are shown as JSON. All are cut at ``MAX_CHARACTERS``.
    """
    if isinstance(value, str):
        cut = value[:MAX_CHARACTERS]
        text = cut if _PLAIN.fullmatch(cut) else repr(cut)[:MAX_CHARACTERS]
        return text + _ending(len(value))
    if isinstance(value, int) and value.bit_length() > 128:  # Python refuses to write integers of thousands of digits
        return f"an integer of {value.bit_length()} bits"
    try:
        text = json.dumps(value)
    except (TypeError, ValueError, RecursionError):
        text = f"a {type(value).__name__}"
    return text[:MAX_CHARACTERS] + _ending(len(text))


def _ending(characters: int) -> str:
    return f"... ({characters} characters)" if characters > MAX_CHARACTERS else ""
