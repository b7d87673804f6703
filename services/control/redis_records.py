"""What control replicas keep in Redis, and the commands that read and write it.

{firsttoken}:config             hash: generation, config_json
{firsttoken}:ticket_secret      from which the keys that sign tickets are derived
{firsttoken}:replicas           set of replica ids
{firsttoken}:members:<replica>  a serialized Membership that expires
{firsttoken}:changed            channel: "look again"

One hash tag: in a cluster all of it lies in one slot, as scripts need.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any, NamedTuple, cast

from redis.asyncio import Redis
from redis.asyncio.retry import Retry
from redis.backoff import NoBackoff
from redis.exceptions import RedisError

from firsttoken.control.v1 import control_pb2
from services.control.state import Members

CONFIG_KEY = "{firsttoken}:config"
SECRET_KEY = "{firsttoken}:ticket_secret"
REPLICAS_KEY = "{firsttoken}:replicas"
MEMBERS_KEY = "{firsttoken}:members:"
CHANNEL = "{firsttoken}:changed"

ANSWER_TIMEOUT_S = 2.0
POLL_S = 1.0

# What any method may raise while Redis does not answer.
FAILURES = (RedisError, OSError, TimeoutError)

# Gives the configuration; ARGV (generation, JSON) becomes it when there is none.
_ENSURE = """
if redis.call('EXISTS', KEYS[1]) == 0 then
  redis.call('HSET', KEYS[1], 'generation', ARGV[1], 'config_json', ARGV[2])
end
return redis.call('HMGET', KEYS[1], 'generation', 'config_json')
"""

# ARGV: the generation to replace, the new one, its JSON, the channel.
_REPLACE = """
if redis.call('HGET', KEYS[1], 'generation') ~= ARGV[1] then
  return 0
end
redis.call('HSET', KEYS[1], 'generation', ARGV[2], 'config_json', ARGV[3])
redis.call('PUBLISH', ARGV[4], 'configuration')
return 1
"""


class StoredConfig(NamedTuple):
    generation: int
    config_json: str


class RedisRecords:
    """The records of one mesh, for one replica. Raises ValueError for a malformed URL."""

    def __init__(self, url: str, *, replica_id: str, members_ttl_s: float) -> None:
        self._redis: Redis = Redis.from_url(
            url,
            socket_timeout=ANSWER_TIMEOUT_S,
            socket_connect_timeout=ANSWER_TIMEOUT_S,
            # A script whose answer was lost must not run twice.
            retry=Retry(NoBackoff(), 0),
        )
        self._replica_id = replica_id
        self._members_key = MEMBERS_KEY + replica_id
        self._members_ttl_ms = int(members_ttl_s * 1000)

    async def close(self) -> None:
        await self._redis.aclose()

    async def ensure_config(self, default: StoredConfig) -> StoredConfig:
        """The configuration there is; `default` becomes it when there is none."""
        answer = await self._run(_ENSURE, *default)
        generation, config_json = answer
        return StoredConfig(int(generation), config_json.decode())

    async def replace_config(self, old_generation: int, new: StoredConfig) -> bool:
        """False when `old_generation` is no longer the latest; nothing has changed then."""
        return bool(await self._run(_REPLACE, old_generation, *new, CHANNEL))

    async def ensure_secret(self, default: bytes) -> bytes:
        """The secret there is; `default` becomes it when there is none."""
        async with self._redis.pipeline(transaction=False) as pipe:
            pipe.set(SECRET_KEY, default, nx=True)
            pipe.get(SECRET_KEY)
            _, secret = await pipe.execute()
        return bytes(secret or default)

    async def share_members(self, members: Members, *, announce: bool) -> None:
        """Renew the record of who has joined this replica, and tell the others on `announce`."""
        membership = control_pb2.Membership(members=members).SerializeToString()
        async with self._redis.pipeline(transaction=False) as pipe:
            pipe.set(self._members_key, membership, px=self._members_ttl_ms)
            pipe.sadd(REPLICAS_KEY, self._replica_id)
            if announce:
                pipe.publish(CHANNEL, self._replica_id)
            await pipe.execute()

    async def withdraw(self) -> None:
        """This replica stops: nobody is joined to it any more."""
        async with self._redis.pipeline(transaction=False) as pipe:
            pipe.delete(self._members_key)
            pipe.srem(REPLICAS_KEY, self._replica_id)
            pipe.publish(CHANNEL, self._replica_id)
            await pipe.execute()

    async def members_elsewhere(self) -> Members:
        """Who has joined the other replicas that are alive."""
        replicas = cast("set[bytes]", await self._redis.smembers(REPLICAS_KEY))
        others = sorted(replicas - {self._replica_id.encode()})
        if not others:
            return ()
        keys = [MEMBERS_KEY.encode() + other for other in others]
        records = cast("list[bytes | None]", await self._redis.mget(keys))
        if dead := [other for other, record in zip(others, records, strict=True) if record is None]:
            await self._redis.srem(REPLICAS_KEY, *dead)
        memberships = [control_pb2.Membership.FromString(record) for record in records if record]
        return tuple(member for membership in memberships for member in membership.members)

    async def changes(self) -> AsyncIterator[None]:
        """Yields once subscribed, then at each change that another replica tells of."""
        own = self._replica_id.encode()
        async with self._redis.pubsub(ignore_subscribe_messages=True) as pubsub:
            await pubsub.subscribe(CHANNEL)
            yield
            while True:
                message = await pubsub.get_message(timeout=POLL_S)
                if message is not None and message["data"] != own:
                    yield

    async def _run(self, script: str, *arguments: str | int) -> Any:
        return await self._redis.eval(script, 1, CONFIG_KEY, *arguments)
