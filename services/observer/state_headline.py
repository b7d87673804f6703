"""What is wrong, in one sentence. Pure."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Sequence

from services.observer.doctor.facts import MIN_REQUESTS
from services.observer.model import Window
from services.observer.rows import phrase
from services.observer.state_fields import Figures, FindingRow, Headline

# A first token so many times as late as before, and by so much, is worth a word; so is such a
# share of requests that failed.
LATER, LATER_BY_S = 1.5, 0.02
FAILED_SHARE, MIN_FAILED = 0.05, 3


def headline(
    window: Window, findings: Sequence[FindingRow], now: Figures | None, before: Figures | None
) -> Headline:
    """The doctor's first finding; else what the figures alone say, and that it has no cause."""
    if findings:
        return Headline(level=findings[0]["severity"], text=findings[0]["summary"])
    if not window.requests and now is None:
        return Headline(level="idle", text="No request has come yet.")
    said = _failing(window, now) or _later(now, before)
    if said:
        return Headline(level="warning", text=said)
    if (few := len(window.requests)) < MIN_REQUESTS:
        text = f"{few} request{'' if few == 1 else 's'} so far: too few to judge."
        return Headline(level="idle", text=text)
    return Headline(level="healthy", text="Nothing stands out.")


def _failing(window: Window, now: Figures | None) -> str:
    if now is None or now["num_failed"] < MIN_FAILED:
        return ""
    share = now["num_failed"] / now["num_requests"]
    if share < FAILED_SHARE:
        return ""
    failed = [
        each.error
        for each in window.requests
        if each.error and each.arrived_unix_s >= now["begin_unix_s"]
    ]
    why = f", most often: {phrase(_most_common(failed))}" if failed else "."
    return f"{share * 100:.0f} % of the requests of the last minutes failed{why}"


def _most_common(errors: Sequence[str]) -> str:
    """One of those that differ from each other in figures alone."""
    alike = [re.sub(r"\d+", "0", error) for error in errors]
    (most, _), *_ = Counter(alike).most_common(1)
    return errors[alike.index(most)]


def _later(now: Figures | None, before: Figures | None) -> str:
    """Of the figure that grew most, with what grew most in it."""
    if now is None or before is None:
        return ""
    if min(now["num_requests"], before["num_requests"]) < MIN_REQUESTS:
        return ""
    grown = [
        (now_s / before_s, name)
        for name, now_s, before_s in (
            ("median", now["p50_s"], before["p50_s"]),
            ("P95", now["p95_s"], before["p95_s"]),
        )
        if now_s and before_s and now_s > before_s * LATER and now_s > before_s + LATER_BY_S
    ]
    if not grown:
        return ""
    times, name = max(grown)
    spent_s, was_s = (
        (each["mean_s"] if name == "median" else each["slowest_s"]) or {} for each in (now, before)
    )
    share = max(spent_s, key=lambda key: spent_s[key] - was_s.get(key, 0.0))
    minutes = (now["begin_unix_s"] - before["begin_unix_s"]) / 60
    return (
        f"The {name} first token comes {times:.1f} times as late as {minutes:.0f} minutes ago."
        f" Most of that is {share.replace('_', ' ')}, {was_s.get(share, 0.0) * 1e3:.0f} to"
        f" {spent_s[share] * 1e3:.0f} ms; no rule says why."
    )
