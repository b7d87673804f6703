"""The engine core over TensorRT-LLM: one process, one loop, requests instead of steps."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Coroutine
from typing import Any

from services.core.ledger import Segment
from services.core.settings import DelaySettings, MeshConfig
from services.runtime.delays import inject
from worker.engines.contract import DisaggregatedParams, EngineInfo
from worker.engines.trtllm import api, disaggregation
from worker.engines.trtllm.admission import Admission, Limits
from worker.engines.trtllm.answers import AnswerReader, EngineLostRequest, NewToken
from worker.engines.trtllm.legs import Kind, Leg, Request
from worker.engines.trtllm.link import AsyncLink
from worker.engines.trtllm.requests import cache_salt, sampling_params
from worker.engines.trtllm.segments import first_token_times
from worker.engines.trtllm.vigil import Vigil
from worker.messages import (
    Cancel,
    Command,
    Compute,
    Fetch,
    FirstToken,
    FirstTokenTimes,
    LoadingEnded,
    RequestFailed,
    Settings,
    Stage,
    Started,
    Submit,
    Taken,
    TransferDone,
)
from worker.reports import PendingReport


class TensorRtCore:
    """Obey, ask the engine, say what it says."""

    def __init__(self, llm: api.LLM, info: EngineInfo, config: MeshConfig, link: AsyncLink) -> None:
        engine = config.worker.tensorrt_llm
        self._llm = llm
        self._info = info
        self._link = link
        self._settings = engine
        self._delay_ms: DelaySettings = config.debug.delay_ms
        self._requests: dict[int, Request] = {}
        self._admission = Admission(
            Limits(
                num_slots=info.num_slots,
                num_blocks=info.num_blocks,
                block_tokens=info.block_tokens,
                max_handoffs=engine.max_handoffs or info.num_slots,
            )
        )
        self._vigil = Vigil(
            llm,
            info,
            engine,
            on_news=self._hear_news,
            num_active=lambda: self._admission.num_running,
        )
        self._pending = PendingReport()
        self._publishing = False

    async def run(self) -> None:
        """Until the front closes the link (LinkClosed), or the engine fails (EngineStalled)."""
        await self._vigil.beside(self._obey_all())

    async def _obey_all(self) -> None:
        while True:
            for command in await self._link.receive():
                self._obey(command)
            self._admit()
            self._say()

    def _obey(self, command: Command) -> None:
        match command:
            case Submit():
                self._submit(command)
            case Settings():
                self._delay_ms = command.delay_ms
            case Stage():  # no block can be joined: its slots are free again
                self._pending.inbox_freed += [block.inbox_slot for block in command.blocks]
            case Cancel() | Compute() | LoadingEnded() | FirstToken() | Fetch() | Taken():
                request = self._requests.get(command.request_id)
                if request is not None:
                    self._advise(request, command)
            case _:
                pass  # of blocks that go through memory: here none do

    def _advise(
        self,
        request: Request,
        command: Cancel | Compute | LoadingEnded | FirstToken | Fetch | Taken,
    ) -> None:
        match command:
            case Cancel():
                self._cancel(request)
            case FirstToken():
                request.answer.append(command.token_id)
            case Fetch():
                if request.admitted and request.leg is None:
                    self._fetch(request, command.params)
            case Taken():
                if request.offered:
                    self._pending.transfers.append(TransferDone(request.request_id, ""))
                    self._release(request)
            case Compute() | LoadingEnded():
                self._compute(request)

    def _submit(self, submit: Submit) -> None:
        request = Request.of(submit)
        if submit.export_from is not None and not submit.offer:
            self._fail(request, "it moves KV to engines of its kind alone")
            return
        self._requests[submit.request_id] = request

    def _admit(self) -> None:
        waiting = [each.submit for each in self._requests.values() if not each.admitted]
        if not waiting:
            return
        rate = self._vigil.statistics.prefill_tokens_per_s
        for submit in self._admission.admit(waiting, prefill_tokens_per_s=rate):
            request = self._requests[submit.request_id]
            request.admitted = True
            now_s = time.monotonic()
            phases = tuple(request.phases.until(now_s))
            num_held = self._vigil.events.num_held(submit.prefix_keys[1:])
            self._pending.started.append(Started(submit.request_id, num_held, phases))
            if request.held:
                request.phases.enter(Segment.KV_LOAD, now_s)
            else:
                self._begin(request)

    # What the engine is asked.

    def _compute(self, request: Request) -> None:
        """Nothing comes, or nothing more: it is computed here."""
        if not request.held:
            return
        leg = request.leg
        if leg is not None and leg.heard:
            return  # it has come
        request.held = False
        if leg is not None:
            leg.drop()
            self._leave(request)
            request.leg = None
        if request.admitted:
            request.phases.enter(Segment.PREFILL_QUEUE, time.monotonic())
            self._begin(request)

    def _begin(self, request: Request) -> None:
        root = request.submit.prefix_keys[0] if request.submit.prefix_keys else b""
        self._vigil.submissions.add(root, request.submit.token_ids)
        work = self._prefill(request) if request.for_another else self._answer(request)
        self._start(request, work)

    async def _answer(self, request: Request) -> None:
        leg = self._ask(request, Kind.WHOLE)
        await self._read(request, leg, self._reader(request))

    async def _prefill(self, request: Request) -> None:
        leg = self._ask(request, Kind.CONTEXT, disaggregation.context_only())
        result = await leg.output.aresult()
        self._vigil.hear()
        leg.heard = True
        completion = result.outputs[0]
        offered = completion.disaggregated_params
        if not leg.dropped:
            # "length" and "not_finished" mean that the answer goes on elsewhere.
            reason = "stop" if completion.finish_reason == "stop" else None
            ids = completion.token_ids or []
            if not ids and offered is not None:
                ids = offered.first_gen_tokens or []
            tokens = self._reader(request).read(
                ids[:1], reason, completion.stop_reason, completion.logprobs
            )
            if not tokens:
                raise EngineLostRequest(f"no token came: {completion.finish_reason}")
            if not tokens[0].finish:
                if offered is None:
                    raise EngineLostRequest("it did not say where its KV is")
                request.offered = True
                self._tell(request, tokens, result, disaggregation.from_engine(offered))
                return
            self._tell(request, tokens, result)
        if offered is not None and completion.finish_reason not in ("stop", "cancelled"):
            self._leave_orphan(request)
        else:
            self._release(request)

    def _fetch(self, request: Request, params: DisaggregatedParams) -> None:
        try:
            checked = disaggregation.generation_only(params, first_token=request.answer[-1])
        except (disaggregation.BadParams, IndexError) as error:
            self._end_transfer(request, str(error))
        else:
            self._start(request, self._generate(request, checked))

    async def _generate(self, request: Request, params: api.DisaggregatedParams) -> None:
        # The engine says the first token again, and counts it.
        first = request.answer[-1:]
        leg = self._ask(request, Kind.GENERATION, params)
        await self._read(request, leg, self._reader(request, known=first))

    def _ask(
        self, request: Request, kind: Kind, params: api.DisaggregatedParams | None = None
    ) -> Leg:
        submit = request.submit
        # In a generation_only request the first token is part of `params`, not of the prompt.
        input_ids = request.input_ids[: -1 if kind is Kind.GENERATION else None]
        request.asked_s = time.monotonic()
        output = self._llm.generate_async(
            input_ids,
            sampling_params=sampling_params(
                submit,
                self._info,
                num_answered=len(input_ids) - len(submit.token_ids),
                num_input=len(input_ids),
            ),
            streaming=kind is not Kind.CONTEXT,
            disaggregated_params=params,
            cache_salt=cache_salt(submit),
        )
        request.leg = Leg(kind, output)
        return request.leg

    def _reader(self, request: Request, known: list[int] | None = None) -> AnswerReader:
        num_answered = len(request.answer) - len(known or ())
        return AnswerReader(
            request.submit, self._info, num_answered=num_answered, known=known or ()
        )

    # What it says.

    async def _read(self, request: Request, leg: Leg, reader: AnswerReader) -> None:
        try:
            await self._read_all(request, leg, reader)
        except (api.RequestError, ValueError):
            if request.leg is leg:
                raise
        if request.leg is not leg:
            self._admission.release(-request.request_id)
            self._admit()
            return
        if not (reader.finished or leg.dropped):
            raise EngineLostRequest("its output ended before the answer")
        self._release(request)

    async def _read_all(self, request: Request, leg: Leg, reader: AnswerReader) -> None:
        async for result in leg.output:
            self._vigil.hear()
            if not leg.heard:
                leg.hear()
                if leg.kind is Kind.GENERATION and not leg.dropped:
                    self._end_transfer(request, "")
            if leg.dropped or reader.finished:
                continue  # until the engine has ended it
            completion = result.outputs[0]
            tokens = reader.read(
                completion.token_ids or (),
                completion.finish_reason,
                completion.stop_reason,
                completion.logprobs,
            )
            self._tell(request, tokens, result)

    def _tell(
        self,
        request: Request,
        tokens: list[NewToken],
        result: api.GenerationResult,
        params: DisaggregatedParams | None = None,
    ) -> None:
        now_s = time.monotonic()
        for token in tokens:
            first = None
            if not request.has_first_token:
                first = self._first(request, result, now_s)
            request.answer.append(token.token_id)
            self._pending.tokens.append((request.request_id, *token, first, now_s, params))
        self._vigil.statistics.add_tokens(len(tokens))
        self._say()

    def _first(
        self, request: Request, result: api.GenerationResult, now_s: float
    ) -> FirstTokenTimes:
        metrics = result.outputs[0].request_perf_metrics
        first = first_token_times(
            request.phases,
            None if metrics is None else metrics.timing_metrics,
            submitted_s=request.submit.submitted_s,
            asked_s=request.asked_s,
            now_s=now_s,
            num_prompt=len(request.submit.token_ids),
            num_cached=result.cached_tokens,
            batch_size=self._admission.num_running,
        )
        self._vigil.statistics.add_first(first)
        return first

    def _end_transfer(self, request: Request, error: str) -> None:
        self._pending.transfers.append(TransferDone(request.request_id, error))
        self._say()

    # How a request ends.

    def _cancel(self, request: Request) -> None:
        if request.offered:
            self._leave_orphan(request)
        elif request.leg is not None:
            request.leg.drop()  # released when the engine has ended it
        else:
            self._release(request)

    def _leave_orphan(self, request: Request) -> None:
        """Nobody says that its KV was fetched. It cannot be aborted: that crashes (#12540)."""
        self._leave(request)
        self._release(request)

    def _leave(self, request: Request) -> None:
        until_s = time.monotonic() + self._settings.transfer_timeout_ms / 1e3
        step = self._vigil.statistics.num_steps
        self._admission.leave(request.request_id, -request.request_id, until_s=until_s, step=step)

    def _release(self, request: Request) -> None:
        if self._requests.pop(request.request_id, None) is None:
            return
        self._admission.release(request.request_id)
        self._pending.released.append(request.request_id)
        self._admission.check_integrity()
        self._admit()
        self._say()

    def _fail(self, request: Request, error: str) -> None:
        self._pending.failed.append(RequestFailed(request.request_id, error))
        self._requests.setdefault(request.request_id, request)
        self._release(request)

    def _start(self, request: Request, work: Coroutine[Any, Any, None]) -> None:
        request.attempt += 1
        self._vigil.spawn(self._guard(request, request.attempt, work))

    async def _guard(self, request: Request, attempt: int, work: Coroutine[Any, Any, None]) -> None:
        """An engine that refuses one request goes on; one that fails otherwise has died."""
        await inject(self._delay_ms.worker_prefill_queue)
        if request.request_id not in self._requests or request.attempt != attempt:
            work.close()  # it is over, or something else has begun
            return
        try:
            await work
        except (api.RequestError, EngineLostRequest, ValueError) as error:
            self._lose(request, str(error))
            self._vigil.probe()  # whether that was all
        except Exception as error:
            self._vigil.die(f"{type(error).__name__}: {error}")

    def _lose(self, request: Request, error: str) -> None:
        leg = request.leg
        if leg is not None and leg.dropped:
            self._release(request)
        elif request.held and not (leg is not None and leg.heard):
            request.leg = None
            self._end_transfer(request, error)  # the front has it computed then
        else:
            self._fail(request, error)

    def _hear_news(self) -> None:
        """Of the engine: what it held may be free."""
        if self._admission.num_orphans:
            statistics = self._vigil.statistics
            self._admission.drain(
                time.monotonic(),
                step=statistics.num_steps,
                is_empty=not statistics.kv.used_blocks,
            )
            self._admit()
        self._say()

    def _say(self) -> None:
        """All that one turn of the loop brought goes out as one report."""
        if not self._publishing:
            self._publishing = True
            asyncio.get_running_loop().call_soon(self._publish)

    def _publish(self) -> None:
        self._publishing = False
        waiting = [each.submit for each in self._requests.values() if not each.admitted]
        load = self._vigil.statistics.load(
            num_running=self._admission.num_running,
            num_waiting=len(waiting),
            num_cached=self._vigil.events.num_keys,
            num_reserved=self._admission.num_blocks,
            num_blocks=self._info.num_blocks,
            queued_tokens=sum(len(submit.token_ids) for submit in waiting),
        )
        report = self._pending.take(self._vigil.take_events(), load)
        if report is not None:
            self._link.send(report)
