"""What each path answers."""

from __future__ import annotations

from typing import Any

from services.gateway.errors import model_not_found
from services.gateway.exchange import Exchange
from services.gateway.gateway import Gateway
from services.gateway.generate import CHAT, COMPLETION, Generation
from services.gateway.metrics import CONTENT_TYPE
from services.gateway.openapi import document


async def chat(gateway: Gateway, exchange: Exchange) -> None:
    await Generation(gateway, exchange, CHAT).run()


async def completions(gateway: Gateway, exchange: Exchange) -> None:
    await Generation(gateway, exchange, COMPLETION).run()


async def models(gateway: Gateway, exchange: Exchange) -> None:
    gateway.authorize(exchange)
    await exchange.respond(200, {"object": "list", "data": [_model(gateway)]})


async def model(gateway: Gateway, exchange: Exchange) -> None:
    gateway.authorize(exchange)
    name = exchange.path_params["model"]
    if name != gateway.served.model:
        raise model_not_found(name, served=gateway.served.model)
    await exchange.respond(200, _model(gateway))


async def health(gateway: Gateway, exchange: Exchange) -> None:
    """200 for as long as the process lives."""
    await exchange.respond(200, {"status": "ok"})


async def ready(gateway: Gateway, exchange: Exchange) -> None:
    """200 only while a request could be answered."""
    problem = gateway.problem
    await exchange.respond(
        503 if problem else 200,
        {
            "status": "not ready" if problem else "ready",
            "reason": problem or None,
            "routers": len(gateway.members.routers),
            "workers": gateway.members.num_workers,
        },
    )


async def metrics(gateway: Gateway, exchange: Exchange) -> None:
    await exchange.respond(200, gateway.metrics.render(), {"content-type": CONTENT_TYPE})


async def openapi(gateway: Gateway, exchange: Exchange) -> None:
    await exchange.respond(200, document(gateway.served, gateway.settings))


def _model(gateway: Gateway) -> dict[str, Any]:
    served = gateway.served
    return {
        "id": served.model,
        "object": "model",
        "created": gateway.started_unix_s,
        "owned_by": "firsttoken",
        "max_model_len": served.max_context_tokens,
    }
