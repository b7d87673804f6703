"""How much a tenant may ask for: requests a second, and at a time.

A tenant's bucket holds up to burst_requests and gains requests_per_s; a request takes
one out. Without requests_per_s nothing is taken.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import TracebackType

from services.core.errors import Overloaded
from services.core.settings import TenantSettings
from services.core.tenants import ANYBODY

# What runs ends when it ends: a guess, unlike the time until a bucket has one more.
CONCURRENT_RETRY_S = 1.0


class _Account:
    """What one tenant has running, and what is in its bucket."""

    __slots__ = ("level", "name", "running", "seen_s", "settings")

    def __init__(self, name: str, settings: TenantSettings, now_s: float) -> None:
        self.name = name
        self.settings = settings
        self.running = 0
        self.level = float(settings.burst_requests)
        self.seen_s = now_s

    def advance(self, now_s: float) -> None:
        gained = max(0.0, now_s - self.seen_s) * self.settings.requests_per_s
        self.level = min(self.level + gained, float(self.settings.burst_requests))
        self.seen_s = max(self.seen_s, now_s)

    def change(self, settings: TenantSettings, now_s: float) -> None:
        self.advance(now_s)
        had_rate, self.settings = self.settings.requests_per_s, settings
        most = float(settings.burst_requests)
        self.level = min(self.level, most) if had_rate else most


class Lease:
    """One request's. Leaving the context gives it back; may be left twice."""

    __slots__ = ("_account", "_limits")

    def __init__(self, limits: TenantLimits, account: _Account | None) -> None:
        self._limits = limits
        self._account = account

    def move(self) -> Lease:
        """From now on that one is held, and this one is nothing."""
        moved, self._account = Lease(self._limits, self._account), None
        return moved

    def refund(self) -> None:
        """Of its tenant's bucket, what it took: the request comes again, another way."""
        if self._account is not None:
            self._limits._refund(self._account)

    def __enter__(self) -> Lease:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        account, self._account = self._account, None
        if account is not None:
            self._limits._leave(account)


class TenantLimits:
    """Pure: the caller says what time it is.

    It keeps as many accounts as there are tenants, and those of removed tenants until
    their last request has ended.
    """

    def __init__(self, tenants: Mapping[str, TenantSettings], now_s: float) -> None:
        self._accounts: dict[str, _Account] = {}
        self._removed: set[str] = set()
        self.configure(tenants, now_s)

    @property
    def num_running(self) -> int:
        return sum(account.running for account in self._accounts.values())

    @property
    def num_accounts(self) -> int:
        return len(self._accounts)

    def running(self, tenant: str) -> int:
        account = self._accounts.get(tenant)
        return account.running if account else 0

    def configure(self, tenants: Mapping[str, TenantSettings], now_s: float) -> None:
        """In force from the next request on; those that run stay, also beyond a lower bound."""
        everybody = {ANYBODY.name: ANYBODY.settings, **tenants}
        for name, settings in everybody.items():
            if name in self._accounts:
                self._accounts[name].change(settings, now_s)
            else:
                self._accounts[name] = _Account(name, settings, now_s)
        self._removed = self._accounts.keys() - everybody.keys()
        for name in list(self._removed):
            self._forget_idle(self._accounts[name])

    def enter(self, tenant: str, now_s: float) -> Lease:
        """Hold it as a context. Raises Overloaded; what is refused takes nothing.

        `tenant` is one of the configuration, or ANYBODY's.
        """
        account = self._accounts[tenant]
        settings = account.settings
        if settings.max_concurrent and account.running >= settings.max_concurrent:
            raise Overloaded(
                f"{account.running} requests of tenant {tenant} run"
                f" (tenants.{tenant}.max_concurrent is {settings.max_concurrent})",
                reason="TOO_MANY_CONCURRENT",
                retry_delay_s=CONCURRENT_RETRY_S,
            )
        if settings.requests_per_s:
            account.advance(now_s)
            if account.level < 1:
                raise Overloaded(
                    f"tenant {tenant} asks too often (tenants.{tenant}.requests_per_s is"
                    f" {settings.requests_per_s:g}, burst_requests {settings.burst_requests})",
                    reason="RATE_LIMITED",
                    retry_delay_s=(1 - account.level) / settings.requests_per_s,
                )
            account.level -= 1
        account.running += 1
        return Lease(self, account)

    def check_integrity(self) -> None:
        for name, account in self._accounts.items():
            assert account.name == name
            assert account.running >= 0
            assert 0 <= account.level <= account.settings.burst_requests
            assert account.running or name not in self._removed

    def _leave(self, account: _Account) -> None:
        account.running -= 1
        if account.name in self._removed:
            self._forget_idle(account)

    def _refund(self, account: _Account) -> None:
        if account.settings.requests_per_s:
            account.level = min(account.level + 1, float(account.settings.burst_requests))

    def _forget_idle(self, account: _Account) -> None:
        if not account.running:
            del self._accounts[account.name]
            self._removed.discard(account.name)
