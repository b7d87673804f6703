"""The life of one request in the router, up to the worker it is given: both ways there share it.

What comes then differs: `proxied` calls the worker and forwards what it says, `planning` leaves
that call to the client.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from abc import ABC, abstractmethod
from collections.abc import Iterator

import grpc

from firsttoken.router.v1 import inference_pb2
from firsttoken.tokenizer.v1 import tokenizer_pb2
from router.account import Account
from router.checks import Checked, check_length, check_request, text_head
from router.dispatch import Grant, Place
from router.mesh import Mesh
from router.peers import Hop
from router.prompt import Prompt
from services.core.errors import MeshError, NotPossible
from services.core.ledger import Ledger, Segment
from services.core.tokens import BYTES_PER_TOKEN
from services.runtime.delays import inject
from services.runtime.identity import caller
from services.runtime.interceptor import Context
from services.runtime.protocol import tell_ledger
from services.runtime.timing import spending


class Journey(ABC):
    """Keeps the configuration that it began with, except for the choice of the worker."""

    def __init__(
        self, mesh: Mesh, request: inference_pb2.GenerateRequest, context: Context
    ) -> None:
        self._account = Account(mesh, context)
        self._ledger = self._account.ledger
        self._outcome = self._account.outcome
        self._mesh = mesh
        self._request = request
        self._context = context
        self._config = mesh.snapshot.config
        self._delay_ms = self._config.debug.delay_ms
        self._tenant = caller()
        self._outcome.tenant = self._tenant.name

    @abstractmethod
    async def _serve(self, checked: Checked, checked_s: float) -> None:
        """What is left to do once the request is known to break no rule."""

    @contextlib.contextmanager
    def _accounting(self) -> Iterator[None]:
        """Whatever fails inside is told and recorded."""
        error, code = "", ""
        try:
            yield
            return
        except NotPossible:  # it comes again, another way
            raise
        except MeshError as failure:
            error, code = failure.message, failure.reason
            raise
        except grpc.aio.AioRpcError as failure:
            code = failure.code().name
            error = failure.details() or code
            raise
        except asyncio.CancelledError:
            # The client may still hear of router.max_deadline_s.
            error, code = "the client is gone, or its deadline has passed", "CANCELLED"
            raise
        except Exception:  # a defect; the client hears no more of it
            error, code = "internal error", "INTERNAL"
            raise
        finally:
            if code:
                self._tell_ledger()
                self._account.record(error, code)

    def _tell_ledger(self) -> None:
        self._ledger.mark_failure(time.monotonic())
        tell_ledger(self._context, self._ledger)

    async def _check_and_serve(self) -> None:
        with spending(self._ledger, Segment.PREPROCESS, since_s=self._ledger.arrived_s):
            checked = check_request(
                self._request,
                self._context.invocation_metadata(),
                self._mesh.bounds,
                self._tenant,
            )
            await inject(self._delay_ms.router_check)
        checked_s = time.monotonic()
        self._outcome.tenant = checked.tenant
        self._outcome.request_class = checked.request_class.value
        await self._serve(checked, checked_s)

    @contextlib.contextmanager
    def _noting_failure(self) -> Iterator[None]:
        """What is cleaned up afterwards is on the way back."""
        try:
            yield
        except Exception:
            self._ledger.mark_failure(time.monotonic())
            raise

    @contextlib.contextmanager
    def _place(self, checked: Checked, checked_s: float) -> Iterator[Place]:
        """In the queue, for a request that may wait."""
        with self._noting_failure(), spending(self._ledger, Segment.QUEUE, since_s=checked_s):
            place = self._mesh.dispatcher.enter(
                checked.request_class, tenant=checked.tenant, remaining_s=self._remaining_s()
            )
        with place, self._noting_failure():
            yield place

    def _remaining_s(self) -> float:
        """Until the request's end at the latest."""
        remaining_s = self._context.time_remaining()
        longest_s = self._config.router.max_deadline_s
        return longest_s if remaining_s is None else min(remaining_s, longest_s)

    async def _preprocess(self, checked: Checked) -> Prompt:
        prompt = self._outcome.prompt = await self._encode(checked)
        await inject(self._delay_ms.router_unowned)
        return prompt

    async def _encode(self, checked: Checked) -> Prompt:
        began_s = time.monotonic()
        encoded = await self._mesh.tokenizers.encode(
            self._encode_request(checked),
            self._hop(self._delay_ms.router_to_tokenizer),
            self._ledger,
            began_s=began_s,
            wait_s=self._config.router.worker_wait_s,
        )
        with spending(self._ledger, Segment.PREPROCESS):
            num_tokens = len(encoded.token_ids) // BYTES_PER_TOKEN
            check_length(checked.field, num_tokens, self._mesh.bounds.max_context_tokens)
            head = text_head(self._request, self._config.router.prefix_length_bytes)
            return Prompt(encoded.token_ids, encoded.prefix_keys, encoded.block_tokens, head)

    def _encode_request(self, checked: Checked) -> tokenizer_pb2.EncodeRequest:
        request = tokenizer_pb2.EncodeRequest(
            model=self._request.model,
            tenant=checked.cache_tenant,
            cache_salt=self._request.cache_salt,
        )
        match checked.field:
            case "text":
                request.text = self._request.text
            case "chat":
                request.chat.CopyFrom(self._request.chat)
            case _:
                request.token_ids = self._request.token_ids
        return request

    async def _wait_for_worker(
        self, place: Place, prompt: Prompt, ledger: Ledger, waiting_s: float
    ) -> Grant:
        end_s: float | None = None
        try:
            grant = await self._mesh.dispatcher.wait_for_worker(place, prompt)
            end_s = grant.granted_s
            return grant
        finally:
            ledger.record(Segment.QUEUE, waiting_s, end_s or time.monotonic())

    def _hop(self, delay_ms: float) -> Hop:
        return Hop(self._context.time_remaining, self._account.trace.metadata(), delay_ms)
