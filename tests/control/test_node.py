from __future__ import annotations

import asyncio
import contextlib
import json
import time

import grpc
import pytest
from google.rpc import error_details_pb2
from grpc_status import rpc_status

from firsttoken.control.v1 import control_pb2
from services.control.node import ControlNode
from services.core.config import parse, to_json
from services.core.settings import MeshConfig
from services.runtime.membership import ControlClient
from tests.control.mesh import make_member, operating, read_to_end
from tests.runtime.waiting import eventually


async def test_a_member_is_told_the_configuration_and_who_is_there() -> None:
    config = parse({"router": {"max_queue": 7}})
    control = ControlNode(config=config)
    async with control, ControlClient(control.address, make_member("a")) as client:
        snapshot, members = client.snapshot, client.members

    assert snapshot == (1, config)
    assert [member.id for member in members] == ["a"]


async def test_a_change_reaches_every_member_and_each_reports_it() -> None:
    async with contextlib.AsyncExitStack() as stack:
        control = await stack.enter_async_context(ControlNode())
        operator = await stack.enter_async_context(operating(control.address))
        clients = [
            await stack.enter_async_context(ControlClient(control.address, make_member(f"{i}")))
            for i in range(20)
        ]
        changed = await operator.set_config({"router.routing_strategy": "round_robin"})
        await eventually(
            lambda: all(
                len(client.members) == 20 and all(m.generation == 2 for m in client.members)
                for client in clients
            )
        )
        strategies = {client.snapshot.config.router.routing_strategy for client in clients}
        listed = await operator.members()
        control.check_integrity()

    assert changed.generation == 2
    assert strategies == {"round_robin"}
    assert {member.generation for member in listed} == {2}


async def test_keys_for_tickets_are_told_to_routers_and_workers_alone_and_renewed() -> None:
    async with contextlib.AsyncExitStack() as stack:
        control = await stack.enter_async_context(ControlNode())
        clients = {
            role: await stack.enter_async_context(
                ControlClient(control.address, make_member(f"{role}", role=role))
            )
            for role in control_pb2.MemberRole.values()
            if role
        }
        router = clients.pop(control_pb2.MEMBER_ROLE_ROUTER)
        worker = clients.pop(control_pb2.MEMBER_ROLE_WORKER)
        before = router.ticket_keys
        signature = before.sign(b"data")
        assert control._hub is not None
        control._hub.renew_ticket_keys(time.time() + 3600)
        await eventually(lambda: router.ticket_keys == worker.ticket_keys != before)

        assert worker.ticket_keys.verifies(b"data", before.current_id, signature)
        after = worker.ticket_keys
        assert before.verifies(b"data", after.current_id, after.sign(b"data"))
        assert not any(client.ticket_keys.keys for client in clients.values())


async def test_a_refused_change_names_its_field_and_leaves_the_generation() -> None:
    async with ControlNode() as control, operating(control.address) as operator:
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await operator.set_config({"router.max_queue": "-1", "tokenizer.nfc": "true"})
        generation = await operator.generation()

    status = rpc_status.from_call(caught.value)
    assert status is not None
    bad = error_details_pb2.BadRequest()
    assert any(detail.Unpack(bad) for detail in status.details)
    assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert [violation.field for violation in bad.field_violations] == ["router.max_queue"]
    assert generation == 1


async def test_a_change_to_the_value_it_has_is_no_new_generation() -> None:
    async with ControlNode() as control, operating(control.address) as operator:
        same = await operator.set_config({"router.max_queue": "1024"})

    assert same.generation == 1


async def test_of_many_changes_that_expect_one_generation_exactly_one_wins() -> None:
    async with ControlNode() as control, operating(control.address) as operator:
        changes = [operator.set_config({"router.max_queue": str(n)}, 1) for n in range(20)]
        answers = await asyncio.gather(*changes, return_exceptions=True)
        generation = await operator.generation()

    won = [answer for answer in answers if isinstance(answer, control_pb2.Configuration)]
    lost = [answer.code() for answer in answers if isinstance(answer, grpc.aio.AioRpcError)]
    assert [answer.generation for answer in won] == [2]
    assert lost == [grpc.StatusCode.ABORTED] * 19
    assert generation == 2


async def test_changes_that_expect_nothing_all_happen_one_after_the_other() -> None:
    async with ControlNode() as control, operating(control.address) as operator:
        changes = [operator.set_config({"router.max_queue": str(n)}) for n in range(20)]
        answers = await asyncio.gather(*changes)

    assert sorted(answer.generation for answer in answers) == list(range(2, 22))


async def test_the_configuration_is_read_with_its_defaults() -> None:
    control = ControlNode(config=parse({"router": {"max_queue": 7}}))
    async with control, operating(control.address) as operator:
        answer = await operator.stub.GetConfig(control_pb2.GetConfigRequest())

    assert json.loads(answer.configuration.config_json)["router"]["max_queue"] == 7
    assert answer.default_json == to_json(MeshConfig())


async def test_the_end_of_a_stream_is_told_to_the_others() -> None:
    control = ControlNode()
    async with control, ControlClient(control.address, make_member("a")) as staying:
        async with ControlClient(control.address, make_member("b")):
            await eventually(lambda: len(staying.members) == 2)
        await eventually(lambda: len(staying.members) == 1)
        control.check_integrity()
        members = staying.members

    assert [member.id for member in members] == ["a"]


async def test_a_hundred_comings_and_goings_leave_nobody_behind() -> None:
    async with ControlNode() as control, operating(control.address) as operator:

        async def come_and_go(number: int) -> None:
            async with ControlClient(control.address, make_member(f"m{number}")) as client:
                client.update(detail="here")
                if number % 3 == 0:
                    await asyncio.sleep(0.02)

        for start in range(0, 100, 20):
            await asyncio.gather(*(come_and_go(start + i) for i in range(20)))
        await eventually(operator.nobody_is_left)
        control.check_integrity()


@pytest.mark.parametrize("steps", [*range(10), 20, 50, 100, 200, 500, 1000, 2000, 5000])
async def test_a_join_cancelled_at_any_await_leaves_nobody_behind(steps: int) -> None:
    async with ControlNode() as control, operating(control.address) as operator:

        async def join() -> None:
            async with ControlClient(control.address, make_member("a")) as client:
                client.update(detail="here")
                await asyncio.Event().wait()

        joining = asyncio.ensure_future(join())
        for _ in range(steps):
            await asyncio.sleep(0)
        joining.cancel()
        await asyncio.wait({joining})
        await eventually(operator.nobody_is_left)
        control.check_integrity()

    assert joining.cancelled()


async def test_a_member_that_reads_nothing_gets_the_latest_and_no_backlog() -> None:
    filler = "x" * (512 << 10)  # more is pushed than the transport can hold
    async with contextlib.AsyncExitStack() as stack:
        control = await stack.enter_async_context(ControlNode())
        operator = await stack.enter_async_context(operating(control.address))
        slow = await operator.join(make_member("slow"))
        busy = await stack.enter_async_context(ControlClient(control.address, make_member("busy")))
        for generation in range(2, 60):
            busy.update(detail=f"{generation} {filler}")
            await operator.set_config({"router.max_queue": str(generation)})
            await eventually(lambda: busy.members[0].generation == generation)  # noqa: B023
        num_pushes, generation = 0, 0
        while generation < 59:
            response = await slow.read()
            assert isinstance(response, control_pb2.JoinResponse)
            num_pushes += 1
            generation = response.configuration.generation or generation
        slow.cancel()

    assert num_pushes < 58


async def test_the_first_message_must_announce_a_member() -> None:
    async with ControlNode() as control, operating(control.address) as operator:
        join = await operator.join(control_pb2.Member())
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await join.read()
        empty = operator.stub.Join()
        await empty.done_writing()
        with pytest.raises(grpc.aio.AioRpcError) as nothing:
            await empty.read()

    assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert "member.id: must be 1 to 128 characters" in (caught.value.details() or "")
    assert nothing.value.code() is grpc.StatusCode.INVALID_ARGUMENT


async def test_a_stream_that_turns_into_another_member_is_refused_and_gone() -> None:
    async with ControlNode() as control, operating(control.address) as operator:
        join = await operator.join(make_member("a"))
        await join.read()
        await join.write(control_pb2.JoinRequest(member=make_member("b")))
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await read_to_end(join)
        members = await operator.members()

    assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert members == []


async def test_a_member_that_half_closes_has_left() -> None:
    async with ControlNode() as control, operating(control.address) as operator:
        join = await operator.join(make_member("a"))
        await join.read()
        await join.done_writing()
        await read_to_end(join)
        members = await operator.members()

    assert await join.code() is grpc.StatusCode.OK
    assert members == []


async def test_who_comes_back_before_the_old_stream_ended_is_listed_once() -> None:
    async with ControlNode() as control, operating(control.address) as operator:
        old = await operator.join(make_member("a", pid=1))
        await old.read()
        new = await operator.join(make_member("a", pid=2))
        await new.read()
        await read_to_end(old)
        members = await operator.members()
        new.cancel()

    assert [member.pid for member in members] == [2]


async def test_stopping_ends_the_streams_at_once() -> None:
    control = ControlNode()
    async with control, operating(control.address) as operator:
        join = await operator.join(make_member("a"))
        await join.read()
        started = time.monotonic()
        await control.__aexit__(None, None, None)
        took_s = time.monotonic() - started
        await read_to_end(join)
        code = await join.code()

    assert code is grpc.StatusCode.OK
    assert took_s < 5.0
