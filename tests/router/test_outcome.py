from __future__ import annotations

from router.dispatch import Grant
from router.outcome import Outcome
from router.prompt import Choice
from services.core import attributes as names
from services.core.ledger import Ledger
from tests.router.fleets import make_fleet


def test_a_span_names_the_configuration_by_which_the_worker_was_chosen() -> None:
    fleet = make_fleet("a")
    [worker] = fleet.workers
    outcome = Outcome()
    assert names.GENERATION not in outcome.attributes(Ledger(0.0))

    choice = Choice(worker, 1, "round robin")
    with Grant(fleet.take(worker, 1), choice, None, 0.0, generation=7) as grant:
        outcome.choose(grant, "round_robin")

    assert outcome.attributes(Ledger(0.0))[names.GENERATION] == 7
