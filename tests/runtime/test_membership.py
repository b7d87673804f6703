from __future__ import annotations

import asyncio
import contextlib
import logging
import threading
from collections.abc import AsyncIterator

import pytest

from firsttoken.control.v1 import control_pb2, control_pb2_grpc
from services.control.node import ControlNode
from services.core.config import Snapshot, from_json, parse
from services.core.settings import MeshConfig
from services.runtime import membership as module
from services.runtime.membership import ControlClient, Members
from services.runtime.server import Context, MeshServer
from services.runtime.startup import StartupError
from tests.control.mesh import make_member, operating
from tests.runtime.ports import free_port
from tests.runtime.waiting import eventually


def free_address() -> str:
    return f"127.0.0.1:{free_port()}"


async def test_nobody_there_is_a_start_up_error(capfd: pytest.CaptureFixture[str]) -> None:
    address = free_address()
    with pytest.raises(StartupError, match=f"no control service at {address}"):
        await ControlClient(address, make_member("a"), start_timeout_s=0.3).__aenter__()

    assert capfd.readouterr().err == ""


def test_no_address_is_a_start_up_error() -> None:
    with pytest.raises(StartupError, match="--control"):
        ControlClient(" , ", make_member("a"))


async def test_a_refused_member_is_told_why() -> None:
    async with ControlNode() as control:
        with pytest.raises(StartupError, match=r"refuses this process: member\.address"):
            await ControlClient(control.address, make_member("a", address="")).__aenter__()


async def test_a_control_that_comes_up_later_is_waited_for() -> None:
    address = free_address()
    client = ControlClient(address, make_member("a"), start_timeout_s=30)
    entering = asyncio.ensure_future(client.__aenter__())
    await asyncio.sleep(0)
    async with ControlNode(listen=address):
        await entering

        assert client.snapshot.generation == 1
        await client.close()


async def test_callbacks_are_called_at_once_and_at_each_push() -> None:
    async with contextlib.AsyncExitStack() as stack:
        control = await stack.enter_async_context(ControlNode())
        operator = await stack.enter_async_context(operating(control.address))
        client = ControlClient(control.address, make_member("a"))
        early: list[Snapshot] = []
        late: list[Snapshot] = []
        seen: list[Members] = []
        client.on_config(early.append)
        await stack.enter_async_context(client)
        client.on_config(late.append)
        client.on_members(seen.append)
        await operator.set_config({"router.max_queue": "7"})
        await eventually(lambda: client.members[0].generation == 2)

        assert [snapshot.generation for snapshot in early] == [1, 2]
        assert early == late
        assert client.snapshot == early[-1]
        assert early[-1].config.router.max_queue == 7
        assert seen[0] != seen[-1]
        assert seen[-1] == client.members


async def test_a_long_configuration_is_parsed_beside_the_loop(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    threads: list[threading.Thread] = []

    def note_thread(text: str) -> MeshConfig:
        threads.append(threading.current_thread())
        return from_json(text)

    monkeypatch.setattr(module, "from_json", note_thread)
    long = parse({"tenants": {f"tenant-{number}": {"weight": 2} for number in range(200)}})
    async with contextlib.AsyncExitStack() as stack:
        control = await stack.enter_async_context(ControlNode(config=long))
        operator = await stack.enter_async_context(operating(control.address))
        client = await stack.enter_async_context(ControlClient(control.address, make_member("a")))
        assert client.snapshot.config == long
        await operator.set_config({"tenants.tenant-7.weight": "3"})
        await eventually(lambda: client.snapshot.config.tenants["tenant-7"].weight == 3)

    assert len(threads) == 2
    assert threading.main_thread() not in threads


async def test_a_callback_that_fails_is_logged_and_changes_nothing(
    caplog: pytest.LogCaptureFixture,
) -> None:
    def fail(value: object) -> None:
        raise KeyError("a defect")

    async with contextlib.AsyncExitStack() as stack:
        control = await stack.enter_async_context(ControlNode())
        operator = await stack.enter_async_context(operating(control.address))
        client = await stack.enter_async_context(ControlClient(control.address, make_member("a")))
        seen: list[Snapshot] = []
        client.on_config(fail)
        client.on_members(fail)
        client.on_config(seen.append)
        await operator.set_config({"router.max_queue": "7"})
        await eventually(lambda: client.members[0].generation == 2)

    assert [snapshot.generation for snapshot in seen] == [1, 2]
    assert "a defect" in caplog.text


async def test_an_update_changes_only_the_fields_it_names() -> None:
    async with contextlib.AsyncExitStack() as stack:
        control = await stack.enter_async_context(ControlNode())
        member = make_member("a", detail="loading", pid=7)
        client = await stack.enter_async_context(ControlClient(control.address, member))
        worker = control_pb2.WorkerCapacity(engine="simulated", num_slots=4)
        client.update(state=control_pb2.MEMBER_STATE_DRAINING, detail="", worker=worker)
        await eventually(lambda: client.members[0].worker.num_slots == 4)

        (known,) = client.members
        assert (known.state, known.detail) == (control_pb2.MEMBER_STATE_DRAINING, "")
        assert (known.pid, known.address) == (7, "127.0.0.1:7000")
        client.update(worker=control_pb2.WorkerCapacity(engine="llamacpp"))
        await eventually(lambda: client.members[0].worker.engine == "llamacpp")

        assert client.members[0].worker.num_slots == 0


async def test_a_field_that_is_none_is_an_error_of_the_caller() -> None:
    client = ControlClient("127.0.0.1:1", make_member("a"))
    with pytest.raises(ValueError, match="colour"):
        client.update(colour="red")


class CountingControl(control_pb2_grpc.ControlServiceServicer):
    """A control service that notes every report."""

    def __init__(self) -> None:
        self.reports: list[control_pb2.Member] = []

    @property
    def last(self) -> control_pb2.Member:
        return self.reports[-1] if self.reports else control_pb2.Member()

    async def Join(
        self, request_iterator: AsyncIterator[control_pb2.JoinRequest], context: Context
    ) -> AsyncIterator[control_pb2.JoinResponse]:
        async for request in request_iterator:
            if not self.reports:
                yield control_pb2.JoinResponse(
                    configuration=control_pb2.Configuration(generation=1, config_json="{}")
                )
                yield control_pb2.JoinResponse(membership=control_pb2.Membership())
            self.reports.append(request.member)

    async def SetConfig(
        self, request: control_pb2.SetConfigRequest, context: Context
    ) -> control_pb2.SetConfigResponse:
        raise NotImplementedError

    async def GetConfig(
        self, request: control_pb2.GetConfigRequest, context: Context
    ) -> control_pb2.GetConfigResponse:
        raise NotImplementedError

    async def ListMembers(
        self, request: control_pb2.ListMembersRequest, context: Context
    ) -> control_pb2.ListMembersResponse:
        raise NotImplementedError


async def test_a_flood_of_updates_becomes_few_reports_and_the_last_one_arrives() -> None:
    service = CountingControl()
    server = MeshServer("127.0.0.1:0", service_names=[])
    control_pb2_grpc.add_ControlServiceServicer_to_server(service, server.server)
    async with server, ControlClient(server.address, make_member("a")) as client:
        for pid in range(1, 5001):
            client.update(pid=pid)
            if pid % 100 == 0:
                await asyncio.sleep(0)
        await eventually(lambda: service.last.pid == 5000)

    assert len(service.reports) < 500


async def test_an_update_without_a_change_is_not_reported() -> None:
    service = CountingControl()
    server = MeshServer("127.0.0.1:0", service_names=[])
    control_pb2_grpc.add_ControlServiceServicer_to_server(service, server.server)
    async with server, ControlClient(server.address, make_member("a", pid=7)) as client:
        await eventually(lambda: service.last.generation == 1)
        before = len(service.reports)
        client.update(pid=7)
        client.update(pid=7, detail="")
        client.update(detail="news")
        await eventually(lambda: service.last.detail == "news")

    assert len(service.reports) == before + 1


async def test_a_configuration_of_another_version_is_not_taken(
    caplog: pytest.LogCaptureFixture,
) -> None:
    class NewerControl(CountingControl):
        async def Join(
            self, request_iterator: AsyncIterator[control_pb2.JoinRequest], context: Context
        ) -> AsyncIterator[control_pb2.JoinResponse]:
            yield control_pb2.JoinResponse(membership=control_pb2.Membership())
            for generation, text in ((1, "{}"), (2, '{"later": {"setting": 1}}'), (3, "{")):
                yield control_pb2.JoinResponse(
                    configuration=control_pb2.Configuration(generation=generation, config_json=text)
                )
            async for request in request_iterator:
                self.reports.append(request.member)

    service = NewerControl()
    server = MeshServer("127.0.0.1:0", service_names=[])
    control_pb2_grpc.add_ControlServiceServicer_to_server(service, server.server)
    async with server, ControlClient(server.address, make_member("a")) as client:
        await eventually(lambda: service.last.generation == 1)
        await eventually(lambda: caplog.text.count("not taken") == 2)

        assert client.snapshot == (1, MeshConfig())


async def test_a_first_configuration_of_another_version_stops_the_start() -> None:
    class NewControl(CountingControl):
        async def Join(
            self, request_iterator: AsyncIterator[control_pb2.JoinRequest], context: Context
        ) -> AsyncIterator[control_pb2.JoinResponse]:
            configuration = control_pb2.Configuration(generation=5, config_json='{"later": 1}')
            yield control_pb2.JoinResponse(configuration=configuration)
            async for request in request_iterator:
                self.reports.append(request.member)

    server = MeshServer("127.0.0.1:0", service_names=[])
    control_pb2_grpc.add_ControlServiceServicer_to_server(NewControl(), server.server)
    async with server:
        with pytest.raises(StartupError, match=r"generation 5 is not valid .* later: is no"):
            await ControlClient(server.address, make_member("a")).__aenter__()


async def test_while_control_is_away_what_was_known_stays_and_updates_are_kept() -> None:
    address = free_address()
    async with contextlib.AsyncExitStack() as stack:
        async with ControlNode(listen=address, config=parse({"router": {"max_queue": 7}})):
            client = await stack.enter_async_context(ControlClient(address, make_member("a")))
            members = client.members
        client.update(detail="while away", pid=8)

        assert client.snapshot.config.router.max_queue == 7
        assert client.members[0].id == members[0].id
        control = await stack.enter_async_context(ControlNode(listen=address))
        operator = await stack.enter_async_context(operating(control.address))
        await eventually(lambda: client.snapshot.config.router.max_queue == 1024)
        await eventually(lambda: client.members[0].detail == "while away")
        (known,) = await operator.members()

    assert (known.detail, known.pid) == ("while away", 8)


async def test_a_control_that_begins_again_at_generation_one_is_followed() -> None:
    address = free_address()
    async with contextlib.AsyncExitStack() as stack:
        async with ControlNode(listen=address), operating(address) as operator:
            client = await stack.enter_async_context(ControlClient(address, make_member("a")))
            await operator.set_config({"router.max_queue": "7"})
            await eventually(lambda: client.snapshot.generation == 2)
        await stack.enter_async_context(ControlNode(listen=address))
        await eventually(lambda: client.snapshot.generation == 1)
        await eventually(lambda: client.members[0].generation == 1)

        assert client.snapshot.config == MeshConfig()


async def test_when_one_replica_dies_the_next_is_joined() -> None:
    async with contextlib.AsyncExitStack() as stack:
        first = ControlNode()
        await first.__aenter__()
        second = await stack.enter_async_context(
            ControlNode(config=parse({"mesh": {"model": "x"}}))
        )
        client = ControlClient(f"{first.address}, {second.address}", make_member("a"))
        await stack.enter_async_context(client)
        operator = await stack.enter_async_context(operating(second.address))

        assert client.snapshot.config.mesh.model != "x"
        await first.__aexit__(None, None, None)
        await eventually(lambda: client.snapshot.config.mesh.model == "x")
        assert [member.id for member in await operator.members()] == ["a"]


async def test_a_dead_replica_in_the_list_is_passed_over_at_start() -> None:
    async with ControlNode() as control:
        addresses = f"{free_address()},{control.address}"
        async with ControlClient(addresses, make_member("a")) as client:
            assert client.snapshot.generation == 1


async def test_a_lost_control_is_logged_once_however_often_it_is_tried(
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.INFO, "services.runtime.membership")
    address = free_address()
    async with contextlib.AsyncExitStack() as stack:
        async with ControlNode(listen=address):
            await stack.enter_async_context(ControlClient(address, make_member("a")))
        async with MeshServer(address, service_names=[]):  # each attempt: UNIMPLEMENTED
            await eventually(lambda: "not joined" in caplog.text)
        await stack.enter_async_context(ControlNode(listen=address))
        await eventually(lambda: caplog.messages[-1] == "joined")
        messages = list(caplog.messages)

    assert messages == ["joined", "not joined", "joined"]


async def test_closing_twice_is_harmless() -> None:
    async with ControlNode() as control, ControlClient(control.address, make_member("a")) as client:
        await client.close()
        await client.close()
