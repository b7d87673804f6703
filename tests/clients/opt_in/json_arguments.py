"""For schemathesis: what its own generator cannot know of our document."""

from __future__ import annotations

import json

import schemathesis
from hypothesis import strategies

# Of the arguments of a tool call in a message: a string that is JSON again.
schemathesis.openapi.format(
    "json",
    strategies.dictionaries(strategies.text(max_size=5), strategies.integers()).map(json.dumps),
)
