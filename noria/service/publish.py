"""Publishing: a committed version becomes what the sampler uses, and is proved to be.

The proof has two parts (design section 6): the integer checksum of the slot's bytes, equal in the committed file and in the sampler's arrays; and
a probe through the same `sample` call that every request takes, whose behavior_logprobs must be the learner's within the dtype's tolerance. A
sampler that went on with an older adapter, or a scale that is wrong on one side, fails the probe. A mismatch stops the run.
"""

import asyncio
import logging
from concurrent.futures import Future
from typing import Protocol, final

import numpy as np

from noria.errors import PublishProofError
from noria.model.lora import HostAdapter
from noria.observe import log_event
from noria.protocols import Clock, Sampler, Spans
from noria.service.device import SharedDevice
from noria.types import AdapterVersion, FloatArray, Ids, LoraSpec, SampleRequest, SamplingParams

log = logging.getLogger(__name__)

PROBE_TOKENS = 4
"""Greedy tokens of a probe: with the probe's prompt they cross every layer, cached and fresh keys, and the head, in a few milliseconds."""

TOLERANCE = {"float32": 1e-4, "bfloat16": 5e-2}
"""Largest mean |behavior - learner| log-probability of a probe, by the base's dtype (design section 6)."""

PROBE_TENANT = "noria"


class PublishingSampler(Sampler, Protocol):
    """The sampler as its publisher sees it: both methods belong to the device thread."""

    def publish(self, run_id: str, version: int, adapter: HostAdapter, scale: float) -> None:
        """Make `version` the run's newest between two dispatches. Keeps `adapter`."""

    def checksum(self, run_id: str, version: int) -> int:
        """The checksum of the version's bytes on the device, where they are brought if they are not there."""


class Scorer(Protocol):
    """The learner as a publisher sees it."""

    def score_ids(self, run_id: str, ids: Ids) -> "Future[FloatArray]":
        """learner_logprobs of ids[1:] by the run's current adapter."""


@final
class Publisher:
    """Publishes and proves. Stateless but for its seams; called from the event loop, one publish per run at a time."""

    def __init__(
        self,
        sampler: PublishingSampler,
        learner: Scorer,
        device: SharedDevice,
        *,
        clock: Clock,
        spans: Spans,
        probe_ids: Ids,
        dtype: str = "float32",
    ) -> None:
        assert len(probe_ids) > 1, "a probe needs a prompt"
        self._sampler, self._learner, self._device, self._clock, self._spans = sampler, learner, device, clock, spans
        self._probe_ids, self._tolerance = probe_ids, TOLERANCE[dtype]

    async def publish(self, record: AdapterVersion, adapter: HostAdapter, lora: LoraSpec, *, timeout_s: float) -> None:
        """Publish a version whose adapter the learner holds too, and prove it. timeout_s: for the bytes, and for the probe, each.

        The sampler keeps `adapter` itself, so nobody may write into it any more.

        Raises PublishProofError (checksum or probe), DeadlineExceededError, StageStoppedError.
        """
        with self._spans.span("adapters", "publish", record.run_id):
            await self._move(record, adapter, lora, timeout_s)
            await self._clock.wait_for(self._probe(record), timeout_s, f"the probe of {record.run_id} v{record.version}")

    async def publish_older(self, record: AdapterVersion, adapter: HostAdapter, lora: LoraSpec, *, timeout_s: float) -> None:
        """As `publish`, for a version older than the one that the learner holds: the checksum is all the proof. Raises as `publish`."""
        with self._spans.span("adapters", "publish", record.run_id):
            await self._move(record, adapter, lora, timeout_s)

    async def _move(self, record: AdapterVersion, adapter: HostAdapter, lora: LoraSpec, timeout_s: float) -> None:
        def move() -> int:
            self._sampler.publish(record.run_id, record.version, adapter, lora.scale)
            return self._sampler.checksum(record.run_id, record.version)

        moving = asyncio.wrap_future(self._device.call(move))
        found = await self._clock.wait_for(moving, timeout_s, f"publish of {record.run_id} v{record.version}")
        log_event(log, logging.INFO, "published", run_id=record.run_id, version=record.version, checksum=found)
        if found != record.checksum:
            raise PublishProofError(
                f"run {record.run_id} v{record.version}: the sampler's slot has checksum {found}, committed was {record.checksum}; the run stops"
            )

    async def _probe(self, record: AdapterVersion) -> None:
        name = f"{record.run_id}/probe-{record.version}"
        params = SamplingParams(max_tokens=PROBE_TOKENS, temperature=0.0)
        completion = await self._sampler.sample(
            SampleRequest(name, PROBE_TENANT, record.run_id, name, self._probe_ids, params, version=record.version)
        )
        scored = await asyncio.wrap_future(self._learner.score_ids(record.run_id, self._probe_ids + completion.sampled_ids))
        learner_logprobs = scored[len(self._probe_ids) - 1 :]
        error = float(np.abs(learner_logprobs - np.array(completion.behavior_logprobs, np.float32)).mean())
        if not error <= self._tolerance:  # NaN fails too
            raise PublishProofError(
                f"run {record.run_id} v{record.version}: the sampler's probe differs from the learner's by {error:.2e} nats on average, "
                f"allowed are {self._tolerance:g}; the run stops"
            )
        if set(completion.versions) != {record.version}:
            raise PublishProofError(f"run {record.run_id} v{record.version}: the probe was answered by versions {sorted(set(completion.versions))}")
