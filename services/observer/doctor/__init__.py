"""Symptoms to causes: what a window of requests shows, with the evidence for it."""

from services.observer.doctor.diagnosis import diagnose, examine, report
from services.observer.doctor.finding import Cause, Clues, Diagnosis, Finding, VolatileSpan

__all__ = [
    "Cause",
    "Clues",
    "Diagnosis",
    "Finding",
    "VolatileSpan",
    "diagnose",
    "examine",
    "report",
]
