"""The life of one request for an answer: read, asked of the mesh, told."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Callable, Sequence
from typing import NamedTuple, TypeAlias

from firsttoken.client import MeshError
from firsttoken.common.v1 import common_pb2
from firsttoken.router.v1 import inference_pb2
from services.core import attributes as names
from services.core.ledger import Ledger, Segment
from services.core.settings import GatewaySettings, TenantSettings
from services.core.tenants import Tenant
from services.gateway.accounts import journey_json, server_timing
from services.gateway.errors import ApiError, ClientGone, from_mesh
from services.gateway.exchange import Exchange
from services.gateway.fields import Fields
from services.gateway.gateway import Gateway
from services.gateway.request import (
    Ask,
    parse_body,
    read_chat_request,
    read_completion_request,
)
from services.gateway.served import Served
from services.gateway.telling import ChatTelling, CompletionTelling, Telling
from services.gateway.upstream import MeshAnswer, merge
from services.runtime.delays import inject
from services.runtime.protocol import spend_callee
from services.runtime.timing import spending, timing

Reader: TypeAlias = Callable[[Fields, Served, GatewaySettings], Ask]

_CLASS_NAMES = {
    common_pb2.REQUEST_CLASS_UNSPECIFIED: "unspecified",
    common_pb2.REQUEST_CLASS_INTERACTIVE: "interactive",
    common_pb2.REQUEST_CLASS_BATCH: "batch",
}


class Api(NamedTuple):
    """One of the two ways to ask for an answer."""

    read: Reader
    tell: type[Telling]
    # As OpenTelemetry names it.
    operation: str


CHAT = Api(read_chat_request, ChatTelling, "chat")
COMPLETION = Api(read_completion_request, CompletionTelling, "text_completion")


class Generation:
    """One request. It holds calls at routers until its end, however that comes."""

    def __init__(self, gateway: Gateway, exchange: Exchange, api: Api) -> None:
        self._gateway = gateway
        self._exchange = exchange
        self._api = api
        self._delay_ms = gateway.snapshot.config.debug.delay_ms
        # Of the first answer.
        self._ledger = Ledger(exchange.arrived_s)
        self._ledgers = [self._ledger]
        self._telling: Telling | None = None
        # From here on a router is looked for.
        self._prepared_s = 0.0

    async def run(self) -> None:
        error, code = "", ""
        try:
            await self._answer()
        except ApiError as refusal:
            error, code = refusal.message, refusal.code or refusal.type
            self._ledger.mark_failure(time.monotonic())
            refusal.headers["server-timing"] = server_timing(self._ledger)
            raise
        except (ClientGone, asyncio.CancelledError):
            error, code = "the client is gone, or the gateway stops", "client_gone"
            self._ledger.mark_failure(time.monotonic())
            raise
        except Exception:  # a defect; the client hears no more of it
            error, code = "internal error", "internal_error"
            self._ledger.mark_failure(time.monotonic())
            raise
        finally:
            self._account(error or self._exchange.error, code or self._exchange.error_code)

    async def _answer(self) -> None:
        tenant, ask = await self._read()
        exchange = self._exchange
        exchange.request_class = _CLASS_NAMES[ask.request_class]
        await inject(self._delay_ms.gateway_unowned)
        with spending(self._ledger, Segment.PREPROCESS):
            telling, answers = self._prepare(ask, tenant)
        self._prepared_s = time.monotonic()
        self._ledgers += [self._beginning() for _ in answers[1:]]
        answer_all = self._stream if ask.told.stream else self._whole
        with contextlib.ExitStack() as stack:
            for answer in answers:
                stack.callback(answer.close)
            async with exchange.while_client_waits():
                await answer_all(ask, telling, answers)

    async def _read(self) -> tuple[Tenant, Ask]:
        gateway, exchange = self._gateway, self._exchange
        settings = gateway.settings
        with spending(self._ledger, Segment.PREPROCESS, since_s=exchange.arrived_s):
            tenant = gateway.authorize(exchange)
        with timing(self._ledger, Segment.TRANSFER):
            body = await exchange.read_json_body(
                max_bytes=settings.max_body_bytes, timeout_s=settings.body_timeout_s
            )
            await inject(self._delay_ms.gateway_read)
        with timing(self._ledger, Segment.PREPROCESS):
            ask = self._api.read(parse_body(body), gateway.served, settings)
            await inject(self._delay_ms.gateway_parse)
            _check_choices(len(ask.requests), tenant.settings)
        return tenant, ask

    def _prepare(self, ask: Ask, tenant: Tenant) -> tuple[Telling, list[MeshAnswer]]:
        gateway, exchange = self._gateway, self._exchange
        telling = self._api.tell(ask, gateway.served, gateway.snapshot.generation)
        self._telling = telling
        metadata = (*exchange.trace.metadata(), *exchange.credentials())
        answers = [
            MeshAnswer(
                gateway.routers,
                request,
                metadata,
                timeout_s=gateway.settings.request_timeout_s,
                direct=gateway.may_fetch(tenant),
                delay_ms=self._delay_ms.gateway_to_router,
            )
            for request in ask.requests
        ]
        return telling, answers

    async def _stream(self, ask: Ask, telling: Telling, answers: Sequence[MeshAnswer]) -> None:
        """The head goes out with the first message, so that an error before it has its status."""
        exchange, is_begun = self._exchange, False
        try:
            async with contextlib.aclosing(merge(answers)) as messages:
                async for index, response in messages:
                    self._note(telling, ask, index, response, answers[index])
                    data = telling.events(index, response)
                    if not is_begun:
                        is_begun = True
                        await inject(self._delay_ms.gateway_to_client)
                        await exchange.begin_stream()
                    if telling.is_complete:
                        await exchange.end_stream(data)
                    elif data:
                        await exchange.write(data)
                    self._note_written(index, answers[index])
        except MeshError as error:
            self._note_failure(error, answers[0])
            if not is_begun:
                raise from_mesh(error, ask.to_param) from None
            await exchange.break_off(from_mesh(error, ask.to_param))
        except ApiError as error:
            if not is_begun:
                self._note_search()
                raise
            await exchange.break_off(error)

    async def _whole(self, ask: Ask, telling: Telling, answers: Sequence[MeshAnswer]) -> None:
        try:
            async with contextlib.aclosing(merge(answers)) as messages:
                async for index, response in messages:
                    self._note(telling, ask, index, response, answers[index])
                    telling.collect(index, response)
        except MeshError as error:
            self._note_failure(error, answers[0])
            raise from_mesh(error, ask.to_param) from None
        except ApiError:
            self._note_search()
            raise
        await self._exchange.respond(
            200, telling.whole(), {"server-timing": server_timing(self._ledger)}
        )

    def _note(
        self,
        telling: Telling,
        ask: Ask,
        index: int,
        response: inference_pb2.GenerateResponse,
        answer: MeshAnswer,
    ) -> None:
        """Time and way of an answer, as far as its newest message tells them."""
        is_finished = response.HasField("finished")
        if self._exchange.ttft_s is None and (is_finished or response.chunk.token_ids):
            self._exchange.ttft_s = time.monotonic() - self._exchange.arrived_s
        if not is_finished:
            return
        ledger = self._ledgers[index]
        # Unless it was written before this message came.
        ledger.mark_first_token(answer.first_message_s)
        ledger.spend(Segment.ROUTE, answer.called_s - self._prepared_s)
        seen_s = answer.first_message_s - answer.called_s
        spend_callee(ledger, response.finished.ledger, seen_s=seen_s)
        if ask.told.ledger:
            telling.journeys.append(journey_json(index, ledger, response.finished))

    def _note_written(self, index: int, answer: MeshAnswer) -> None:
        """Of an answer that is streamed, the first token is out when it is written."""
        ledger, now_s = self._ledgers[index], time.monotonic()
        if ledger.first_token_s is None:
            ledger.record(Segment.TRANSFER, answer.first_message_s, now_s)
            ledger.mark_first_token(now_s)

    def _note_failure(self, error: MeshError, answer: MeshAnswer) -> None:
        """What the mesh says of an answer that fails, the time on the way there too."""
        if answer.failure is error:
            # Of a whole answer the caller never has a first token: it has failed.
            self._ledger.mark_failure(answer.first_message_s)
        elif self._ledger.first_token_s is not None:
            return  # another one failed, and the ledger is the first one's
        elif error.elapsed_ms and not answer.first_message_s:
            # That the other answers were ended since then is on the way back.
            self._ledger.mark_failure(answer.called_s + error.elapsed_ms / 1e3)
        self._ledger.mark_failure(time.monotonic())
        self._ledger.spend(Segment.ROUTE, answer.called_s - self._prepared_s)
        for segment, spent_ms in error.ledger.items():
            self._ledger.spend(Segment(segment), spent_ms / 1e3)

    def _note_search(self) -> None:
        """No router was found for an answer."""
        if self._ledger.first_token_s is None:
            self._ledger.spend(Segment.ROUTE, time.monotonic() - self._prepared_s)

    def _beginning(self) -> Ledger:
        """For one more answer: what it shares with the first."""
        ledger = Ledger(self._exchange.arrived_s)
        for segment, spent_s in self._ledger.sums_s():
            ledger.spend(segment, spent_s)
        return ledger

    def _account(self, error: str, code: str) -> None:
        metrics, exchange, telling = self._gateway.metrics, self._exchange, self._telling
        found: dict[str, str] = {
            names.OPERATION: self._api.operation,
            names.MODEL: self._gateway.served.model,
            names.ROUTE: exchange.route,
            names.REQUEST_ID: exchange.request_id,
        }
        if code:
            found[names.ERROR_TYPE] = code
        if telling is not None:
            usage = telling.usage
            metrics.tokens_of("prompt").inc(usage.prompt_tokens)
            metrics.tokens_of("cached").inc(usage.cached_tokens)
            metrics.tokens_of("completion").inc(usage.completion_tokens)
        if exchange.ttft_s is not None:
            metrics.ttft_of(exchange.route, exchange.request_class).observe(exchange.ttft_s)
        self._gateway.reporter.record_request(
            "gateway.request",
            exchange.trace,
            exchange.caller.span_id,
            self._ledger,
            found,
            error=error,
        )


def _check_choices(num_choices: int, settings: TenantSettings) -> None:
    """Raises ApiError for more than the tenant could ever have: no waiting would change it."""
    bounds = {"max_concurrent": settings.max_concurrent}
    if settings.requests_per_s:
        bounds["burst_requests"] = settings.burst_requests
    for name, most in bounds.items():
        if most and num_choices > most:
            rule = f"must ask for at most {most} answers at a time: this tenant's {name}"
            raise ApiError(400, f"n {rule}", param="n", code="too_many_choices")
