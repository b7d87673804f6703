"""Hears what the processes of the mesh tell."""

from __future__ import annotations

from collections.abc import AsyncIterator

from firsttoken.observer.v1 import observer_pb2, observer_pb2_grpc
from services.core.errors import InvalidArgument
from services.observer.books import Books
from services.observer.hearing import MAX_ID_CHARACTERS, Teller
from services.runtime.interceptor import Context

SERVICE_NAME = observer_pb2.DESCRIPTOR.services_by_name["ObserverService"].full_name


class ObserverService(observer_pb2_grpc.ObserverServiceServicer):
    def __init__(self, books: Books) -> None:
        self._books = books

    async def Report(
        self, requests: AsyncIterator[observer_pb2.ReportRequest], context: Context
    ) -> observer_pb2.ReportResponse:
        teller: Teller | None = None
        async for message in requests:
            if message.HasField("sender"):
                teller = _to_teller(message.sender)
            if teller is None:
                raise InvalidArgument.of("sender", "must be in the first message of a stream")
            self._books.hear(teller, message)
        return observer_pb2.ReportResponse()


def _to_teller(sender: observer_pb2.Sender) -> Teller:
    teller = Teller(sender.member_id, sender.service, sender.host, sender.pid)
    for name in ("member_id", "service"):
        if not 1 <= len(getattr(teller, name)) <= MAX_ID_CHARACTERS:
            raise InvalidArgument.of(
                f"sender.{name}", f"must have 1 to {MAX_ID_CHARACTERS} characters"
            )
    return teller
