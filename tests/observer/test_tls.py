from __future__ import annotations

import asyncio
import ssl
import time
from pathlib import Path

import pytest

from firsttoken.control.v1 import control_pb2
from services.cli.local_ca import LocalCa
from services.control.node import ControlNode
from services.core.ledger import Ledger
from services.core.settings import MeshConfig
from services.observer import page_server, requests
from services.observer.node import ObserverNode
from services.runtime import reporter as reporter_module
from services.runtime.reporter import Reporter
from services.runtime.telemetry import TraceContext
from services.runtime.tls import CA_FILE, MESH_NAME, Tls
from tests.runtime.certificates import write
from tests.runtime.waiting import eventually


async def test_it_hears_over_tls_and_its_page_takes_a_new_certificate(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(requests, "GRACE_S", 0.05)
    monkeypatch.setattr(reporter_module, "INTERVAL_S", 0.1)
    monkeypatch.setattr(page_server, "TLS_POLL_S", 0.05)
    ca = LocalCa.new()
    directory = write(tmp_path, ca.pem.certificate, ca.service())
    tls = Tls(directory, check_interval_s=0.0)
    async with (
        ControlNode(config=MeshConfig(), tls=tls) as control,
        ObserverNode(control=control.address, tls=tls) as observer,
        Reporter(service="router", member_id="router-1", tls=tls) as reporter,
    ):
        member = control_pb2.Member(
            role=control_pb2.MEMBER_ROLE_OBSERVER,
            state=control_pb2.MEMBER_STATE_READY,
            address=observer.report_address,
        )
        reporter.update_members([member])
        ledger = Ledger(time.monotonic())
        context = TraceContext.new().child(sampled=True)
        reporter.record_request("router.generate", context, "", ledger, {})
        await eventually(lambda: len(observer.books.requests) == 1)
        trusted = ssl.create_default_context(cafile=str(directory / CA_FILE))

        async def certificate() -> bytes:
            host, _, port = observer.address.rpartition(":")
            _, writer = await asyncio.open_connection(
                host, int(port), ssl=trusted, server_hostname=MESH_NAME
            )
            shown: bytes = writer.get_extra_info("ssl_object").getpeercert(binary_form=True)
            writer.close()
            return shown

        assert observer.url.startswith("https://")
        before = await certificate()
        write(tmp_path, ca.pem.certificate, ca.service())

        async def is_new() -> bool:
            return await certificate() != before

        await eventually(is_new, "the new certificate")
