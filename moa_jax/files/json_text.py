"""JSON documents as RFC 8259 defines them: NaN and infinity are written as null."""

from __future__ import annotations

import json
import math
from typing import Any


def to_json(content: Any, **layout: Any) -> str:
    """Serialise a value of JSON's types; `layout` is passed to `json.dumps`."""
    return json.dumps(_finite(content), allow_nan=False, **layout)


def _finite(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _finite(each) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(each) for each in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
