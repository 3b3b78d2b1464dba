"""Loads verified versions into an engine, and lets only those serve with which it computes what the learner does."""

from structlog.typing import FilteringBoundLogger

from seed_async.messages import WeightsManifest
from seed_async.metrics import Metrics
from seed_async.ports import ScoringEngine
from seed_async.role import RoleContext
from seed_async.topology_roles import EngineRole
from seed_async.weights import WeightReceiver
from seed_async.weights.canary import canary_gap_nats, canary_text
from seed_async.weights.receiver import Update


class EngineBrokenError(RuntimeError):
    """An engine that computes wrongly even with weights that it has served before; its process ends, another starts."""


class WeightLoader:
    """Flips an engine to a new version, compares the canary, and goes back when it differs.

    For the way back the tensors in service are kept: one copy of the weights in this process's memory.
    """

    def __init__(
        self,
        engine: ScoringEngine,
        receiver: WeightReceiver,
        name: str,
        tolerance_nats: float,
        metrics: Metrics,
        log: FilteringBoundLogger,
    ) -> None:
        """`name` is the process's, `policy-0`. Nothing is in service yet, whatever the engine was made with."""
        self._engine, self._receiver, self._name = engine, receiver, name
        self._tolerance_nats, self._metrics, self._log = tolerance_nats, metrics, log
        self._kept: Update | None = None
        self.version = -1
        """The version that the engine may serve; -1 for none."""

    def load(self, update: Update) -> bool:
        """Load a version and acknowledge it; False when its canary is refused. Raises EngineBrokenError.

        Called between two steps, so that no token is ever sampled with refused weights.
        """
        manifest, tensors = update
        # The same version comes again when the engine has refused it, and then holds its number already.
        again = manifest.version <= self._engine.health().version
        self._engine.load_weights(manifest.version, tensors, rollback=again)
        gap_nats = self._gap_nats(manifest)
        if gap_nats is not None:
            self._metrics.gauge("canary_gap_nats").set(gap_nats)
            if gap_nats > self._tolerance_nats:
                self._refuse(manifest, gap_nats)
                return False
            self._kept = update
        self.version = manifest.version
        self._receiver.acknowledge(manifest)
        self._metrics.gauge("policy_version").set(manifest.version)
        self._log.info(
            "weights loaded",
            version=manifest.version,
            num_bytes=manifest.num_bytes,
            digest=manifest.digest,
            canary_gap_nats=gap_nats,
        )
        return True

    def _gap_nats(self, manifest: WeightsManifest) -> float | None:
        """The gap to the learner; None where there is nothing to compare."""
        if manifest.canary is None:
            return None
        text = canary_text(manifest.canary.vocabulary)
        return canary_gap_nats(manifest.canary.logprobs, self._engine.score(text.prompt_ids, text.response_ids))

    def _refuse(self, manifest: WeightsManifest, gap_nats: float) -> None:
        self._metrics.counter("canary_refusals_total").inc()
        self._log.error(
            "weights refused: the engine's log-probs on the canary are not the learner's",
            engine=self._name,
            version=manifest.version,
            gap_nats=gap_nats,
            tolerance_nats=self._tolerance_nats,
            serves=self.version,
        )
        if self._kept is not None:
            kept, tensors = self._kept
            self._engine.load_weights(kept.version, tensors, rollback=True)
            back_nats = self._gap_nats(kept)
            if back_nats is not None and back_nats > self._tolerance_nats:
                raise EngineBrokenError(
                    f"{self._name} went back from version {manifest.version} to {kept.version} and is still "
                    f"{back_nats:.3g} nats from what the learner computed"
                )
        self._receiver.refuse(manifest)


def open_loader(
    context: RoleContext, settings: EngineRole, engine: ScoringEngine, receiver: WeightReceiver
) -> WeightLoader:
    """The loader of a role's engine, which `settings` asked for."""
    tolerance_nats = context.topology.canary_tolerance_nats(settings)
    return WeightLoader(engine, receiver, context.name, tolerance_nats, context.metrics, context.log)
