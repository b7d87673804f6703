from __future__ import annotations

from hypothesis import settings

# A shared machine is slow at random: deadlines per example would fail at random too.
settings.register_profile("firsttoken", deadline=None, max_examples=60)
settings.load_profile("firsttoken")
