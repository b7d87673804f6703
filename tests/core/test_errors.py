from __future__ import annotations

import pytest
from google.rpc import code_pb2

from services.core import errors
from services.core.errors import InvalidArgument, MeshError, Overloaded, Violation

CLASSES = [
    each for each in vars(errors).values() if isinstance(each, type) and issubclass(each, MeshError)
]


@pytest.mark.parametrize("kind", CLASSES)
def test_every_error_has_a_status_that_grpc_knows(kind: type[MeshError]) -> None:
    assert kind.status in {name for name, _ in code_pb2.Code.items()}
    assert kind.status != "OK"


@pytest.mark.parametrize("kind", CLASSES)
def test_the_docstring_s_table_says_the_same(kind: type[MeshError]) -> None:
    assert errors.__doc__ is not None
    lines = [line for line in errors.__doc__.splitlines() if f"{kind.__name__} " in line]

    assert len(lines) == 1
    assert kind.status in lines[0].split()


def test_an_invalid_argument_says_all_its_violations() -> None:
    error = InvalidArgument([Violation("a", "must be 1"), Violation("b", "must be 2")])

    assert str(error) == "a: must be 1; b: must be 2"
    assert error.violations == (("a", "must be 1"), ("b", "must be 2"))
    assert InvalidArgument.of("a", "must be 1").violations == (("a", "must be 1"),)


def test_an_error_carries_what_a_program_needs() -> None:
    error = Overloaded("full", reason="QUEUE_FULL", retry_delay_s=0.5)

    assert (str(error), error.reason, error.retry_delay_s) == ("full", "QUEUE_FULL", 0.5)
