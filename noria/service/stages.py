"""What the runs of one server share: its stages, and the tenants' shares of the sampler."""

import asyncio
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from typing import TypeVar, final

from noria.actors.pool import ActorPool
from noria.adapters.versions import VersionFiles
from noria.buffer.sqlite import SqliteBuffer
from noria.config import LearnerConfig, RunConfig
from noria.errors import StageStoppedError
from noria.learner.learner import Learner
from noria.protocols import Clock, Spans
from noria.sampler.engine import SamplerEngine
from noria.service.device import SharedDevice
from noria.service.publish import Publisher

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Stages:
    """What a run uses of its server. All runs share these objects. sizes: the learner's configuration."""

    learner: Learner
    sampler: SamplerEngine
    device: SharedDevice
    publisher: Publisher
    buffer: SqliteBuffer
    pool: ActorPool
    files: VersionFiles
    clock: Clock
    spans: Spans
    sizes: LearnerConfig
    keep_versions: int
    weights: "TenantWeights"

    def width_of(self, config: RunConfig) -> int:
        """The width of the rank class of a run that fits on this server."""
        return self.sizes.class_of(config.adapter.rank)

    async def on_device(self, function: Callable[[], T], timeout_s: float, what: str) -> T:
        """The result of `function`, called on the device thread. Raises what it raises, DeadlineExceededError, StageStoppedError."""
        return await self.clock.wait_for(asyncio.wrap_future(self.device.call(function)), timeout_s, what)

    def soon_on_device(self, function: Callable[[], None]) -> None:
        """Call `function` on the device thread after all earlier calls; its failure is nobody's. Nothing if the device has stopped."""
        with suppress(StageStoppedError):
            self.device.call(function)


@final
@dataclass(slots=True)
class TenantWeights:
    """What the sampler must know of the active runs: each tenant's fair-share weight, which is the sum over its runs, and which are deterministic.

    Touched by the event loop only.
    """

    sampler: SamplerEngine
    device: SharedDevice
    _active: dict[str, RunConfig] = field(default_factory=dict)

    def join(self, config: RunConfig) -> None:
        """A run becomes active; what it samples from now on is served by the new weight. Raises StageStoppedError."""
        self._active[config.name] = config
        self._set(config.tenant)
        self._set_deterministic(config, is_deterministic=config.deterministic)

    def leave(self, run_id: str) -> None:
        """A run has ended. Idempotent."""
        config = self._active.pop(run_id, None)
        if config is not None:
            with suppress(StageStoppedError):
                self._set(config.tenant)
                self._set_deterministic(config, is_deterministic=False)

    def _set(self, tenant: str) -> None:
        weight = sum(config.weight for config in self._active.values() if config.tenant == tenant)
        if weight:
            self.device.call(lambda: self.sampler.set_weight(tenant, weight))

    def _set_deterministic(self, config: RunConfig, *, is_deterministic: bool) -> None:
        if config.deterministic:
            self.device.call(lambda: self.sampler.set_deterministic(config.name, is_deterministic=is_deterministic))
