"""RouterService, for those who run the mesh: how routing goes, for all requests together."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from firsttoken.router.v1 import router_pb2, router_pb2_grpc
from router.mesh import Mesh
from services.core.metrics import LEAK, Metric, Sample
from services.runtime.interceptor import Context

SERVICE_NAME = router_pb2.DESCRIPTOR.services_by_name["RouterService"].full_name


class Stats(NamedTuple):
    """Of one router, the fields of GetStatsResponse. What is counted counts from its start."""

    strategy: str
    num_in_flight: int
    num_waiting: int
    num_decisions: int
    num_unreported: int
    predicted_tokens: int
    cached_tokens: int
    overpredicted_tokens: int
    underpredicted_tokens: int
    num_index_blocks: int
    max_index_blocks: int
    num_index_dropped: int
    num_feeds: int
    num_live_feeds: int
    num_snapshots: int
    num_gaps: int
    num_broken_streams: int
    num_recorded: int
    num_not_recorded: int


def read_stats(mesh: Mesh) -> Stats:
    dispatcher, knowledge = mesh.dispatcher, mesh.dispatcher.knowledge
    counts, index = knowledge.counts, knowledge.index
    return Stats(
        strategy=mesh.snapshot.config.router.routing_strategy,
        num_in_flight=dispatcher.num_in_flight,
        num_waiting=dispatcher.num_waiting,
        num_decisions=counts.decisions,
        num_unreported=counts.unreported,
        predicted_tokens=counts.predicted_tokens,
        cached_tokens=counts.cached_tokens,
        overpredicted_tokens=counts.overpredicted_tokens,
        underpredicted_tokens=counts.underpredicted_tokens,
        num_index_blocks=len(index),
        max_index_blocks=index.max_blocks,
        num_index_dropped=index.num_dropped,
        num_feeds=mesh.watching.num_followed,
        num_live_feeds=mesh.watching.num_live,
        num_snapshots=counts.snapshots,
        num_gaps=counts.gaps,
        num_broken_streams=mesh.watching.num_broken,
        num_recorded=mesh.recorder.num_written,
        num_not_recorded=mesh.recorder.num_dropped,
    )


_WAITING = Metric(
    "firsttoken.router.requests.waiting", "{request}", "Requests that wait for a worker.", False
)
_PREPARING = Metric(
    "firsttoken.router.requests.preparing",
    "{request}",
    "Requests let in whose prompt is being encoded.",
    False,
)
_AT_WORKER = Metric(
    "firsttoken.router.worker.in_flight", "{request}", "Requests at each worker.", False
)
_PLANS = Metric(
    "firsttoken.router.plans",
    "{plan}",
    "Answers that clients fetch themselves, by what became of it: answered, failed, expired (the"
    " client did not come), lost (its worker could not say).",
    True,
)
_OPEN_PLANS = Metric(
    "firsttoken.router.plans.open", "{plan}", "Plans given out that have not ended.", False
)
# What each field of Stats is called and counts, for the observer.
_OF_STATS = {
    "num_in_flight": Metric(
        "firsttoken.router.requests.in_flight", "{request}", "Requests at workers.", False
    ),
    "num_decisions": Metric(
        "firsttoken.router.decisions",
        "{request}",
        "Requests answered by a worker that was chosen by what is cached where.",
        True,
    ),
    "num_unreported": Metric(
        "firsttoken.router.decisions.unreported",
        "{request}",
        "Of those, by prediction alone: the worker's reports did not come.",
        True,
    ),
    "predicted_tokens": Metric(
        "firsttoken.router.cache.predicted", "{token}", "Expected to be cached.", True
    ),
    "cached_tokens": Metric("firsttoken.router.cache.hit", "{token}", "Found in the cache.", True),
    "overpredicted_tokens": Metric(
        "firsttoken.router.cache.overpredicted", "{token}", "Expected and not found.", True
    ),
    "underpredicted_tokens": Metric(
        "firsttoken.router.cache.underpredicted", "{token}", "Found, not expected.", True
    ),
    "num_index_blocks": Metric(
        "firsttoken.router.index.blocks", "{block}", "Blocks whose holders are known.", False
    ),
    "num_index_dropped": Metric(
        "firsttoken.router.index.dropped", "{block}", "Forgotten: the index was full.", True
    ),
    "num_feeds": Metric(
        "firsttoken.router.feeds", "{feed}", "Workers and KV stores that are followed.", False
    ),
    "num_live_feeds": Metric(
        "firsttoken.router.feeds.live", "{feed}", "Those whose reports come.", False
    ),
    "num_snapshots": Metric(
        "firsttoken.router.feeds.snapshots", "{snapshot}", "Snapshots taken in.", True
    ),
    "num_gaps": Metric("firsttoken.router.feeds.gaps", "{gap}", "Reports that were missing.", True),
    "num_broken_streams": Metric(
        "firsttoken.router.feeds.broken", "{stream}", "Streams that ended or failed.", True
    ),
    "num_recorded": Metric(
        "firsttoken.router.record.written", "{decision}", "Decisions recorded.", True
    ),
    "num_not_recorded": Metric(
        "firsttoken.router.record.dropped", "{decision}", "Decisions not recorded.", True
    ),
}
METRICS = (
    *_OF_STATS.values(),
    *(_WAITING, _PREPARING, _AT_WORKER, _PLANS, _OPEN_PLANS, LEAK),
)


def read_metrics(mesh: Mesh) -> Iterator[Sample]:
    stats, dispatcher = read_stats(mesh)._asdict(), mesh.dispatcher
    for field, metric in _OF_STATS.items():
        yield Sample(metric.name, stats[field])
    for request_class, count in dispatcher.num_waiting_by_class.items():
        yield Sample(_WAITING.name, count, (("request_class", request_class.value),))
    yield Sample(_PREPARING.name, dispatcher.num_pending - dispatcher.num_waiting)
    workers = (*dispatcher.workers, *dispatcher.prefill_workers)
    for worker in workers:
        yield Sample(_AT_WORKER.name, worker.in_flight, (("worker", worker.announced.id),))
    for outcome, count in mesh.plans.counts.ended.items():
        yield Sample(_PLANS.name, count, (("outcome", outcome),))
    yield Sample(_OPEN_PLANS.name, mesh.plans.num_open)
    held = {
        "plans": mesh.plans.num_open,
        "slots": sum(worker.in_flight for worker in workers),
        "places": dispatcher.num_pending,
        "errands": dispatcher.knowledge.num_errands,
    }
    for what, count in held.items():
        yield Sample(LEAK.name, 0 if mesh.limits.num_running else count, (("what", what),))


class RouterServicer(router_pb2_grpc.RouterServiceServicer):
    def __init__(self, mesh: Mesh) -> None:
        self._mesh = mesh

    async def GetStats(
        self, request: router_pb2.GetStatsRequest, context: Context
    ) -> router_pb2.GetStatsResponse:
        return router_pb2.GetStatsResponse(**read_stats(self._mesh)._asdict())
