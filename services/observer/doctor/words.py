"""Figures as people read them. Pure."""

from __future__ import annotations


def ms(duration_s: float) -> str:
    value = duration_s * 1e3
    return f"{value:.0f} ms" if abs(value) >= 10 else f"{value:.2g} ms"


def percent(share: float) -> str:
    return f"{100 * share:.0f} %"


def times(factor: float) -> str:
    return f"{factor:.1f}x"


def count(number: float, noun: str) -> str:
    """ "1 request", "2 requests"."""
    return f"{number:.0f} {noun}{'' if number == 1 else 's'}"


def at_least(text: str) -> str:
    return f"at least {text}"


def at_most(text: str) -> str:
    return f"at most {text}"


def of_ttft(explains_s: float, mean_ttft_s: float) -> str:
    """What a change may bring at most."""
    return f"up to {ms(explains_s)} of the mean TTFT of {ms(mean_ttft_s)}"
