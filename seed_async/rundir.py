"""The run directory: every path and endpoint of a run, in one place.

topology.yaml       the resolved topology          metrics.jsonl       one line an update (learner)
model/ stage1/      initial checkpoint, its data   evaluations.jsonl   one line an evaluation
logs/ targets/      a log and a scrape target      trajectories.jsonl  one line a trajectory with its skill and fate
checkpoints/        of the learner
timeline/ pulse/    what each process did, does    counts.json         the buffer's final accounting
journal.jsonl       every fate (buffer)            trained.jsonl       what was trained (learner)
final/              the exported policy            summary.json plots/ the result
phases.json         wall seconds, of all launches
"""

import tempfile
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path

from seed_async.topology import Topology

MAX_IPC_PATH_BYTES = 100
"""Unix socket paths end at 107 bytes; longer run directories get their sockets in the temporary directory."""


@dataclass(frozen=True)
class RunDir:
    """Paths of one run below `root`; nothing is created by asking for a path."""

    root: Path

    @property
    def topology(self) -> Path:
        """The resolved topology, with every default written out."""
        return self.root / "topology.yaml"

    @property
    def model(self) -> Path:
        """The Hugging Face folder that Stage 1 of this run made."""
        return self.root / "model"

    @property
    def stage1(self) -> Path:
        """Demonstrations, analyses and metrics of Stage 1."""
        return self.root / "stage1"

    @property
    def logs(self) -> Path:
        """One log a process."""
        return self.root / "logs"

    @property
    def targets(self) -> Path:
        """Prometheus file-based service discovery, one file a process."""
        return self.root / "targets"

    @property
    def timeline(self) -> Path:
        """Spans of activity, one file a process."""
        return self.root / "timeline"

    def pulse(self, name: str) -> Path:
        """The counter that a process's main loop moves on."""
        return self.root / "pulse" / name

    @property
    def metrics(self) -> Path:
        """The learner's metrics, one JSON line an update."""
        return self.root / "metrics.jsonl"

    @property
    def evaluations(self) -> Path:
        """The evaluation actor's results, one JSON line an evaluation."""
        return self.root / "evaluations.jsonl"

    @property
    def trajectories(self) -> Path:
        """The buffer's record, one JSON line a trajectory."""
        return self.root / "trajectories.jsonl"

    @property
    def journal(self) -> Path:
        """The buffer's provenance journal."""
        return self.root / "journal.jsonl"

    @property
    def checkpoints(self) -> Path:
        """The learner's checkpoints."""
        return self.root / "checkpoints"

    @property
    def trained(self) -> Path:
        """The learner's provenance journal."""
        return self.root / "trained.jsonl"

    @property
    def rendezvous(self) -> Path:
        """Where the learner's rpc control plane is to be found, with `weights.control: rpc`."""
        return self.root / "rendezvous.json"

    @property
    def keys(self) -> Path:
        """The CURVE keys of the processes, with `transport.curve`."""
        return self.root / "keys"

    @property
    def counts(self) -> Path:
        """The buffer's accounting at its end."""
        return self.root / "counts.json"

    @property
    def final(self) -> Path:
        """The policy after the last update, as a Hugging Face folder."""
        return self.root / "final"

    @property
    def summary(self) -> Path:
        """The result of the run."""
        return self.root / "summary.json"

    @property
    def phases(self) -> Path:
        """Wall seconds of each phase, over all launches of the run."""
        return self.root / "phases.json"

    @property
    def plots(self) -> Path:
        """PNG plots."""
        return self.root / "plots"

    @property
    def launcher(self) -> Path:
        """The launcher's process id while it runs."""
        return self.root / "launcher.json"

    def initial_model(self, topology: Topology) -> Path:
        """The checkpoint that the run starts from, which is also the reference model."""
        return topology.model.path or self.model

    def segments(self) -> Path:
        """Where weight versions lie for the receivers of this host: memory-backed where the system has /dev/shm."""
        memory = Path("/dev/shm")
        base = memory if memory.is_dir() else Path(tempfile.gettempdir())
        return base / f"seed-async-{self._digest()}"

    def _digest(self) -> str:
        return sha256(str(self.root.resolve()).encode()).hexdigest()[:16]

    def sockets(self) -> Path:
        """Where ipc sockets lie: in the run directory, or in the temporary directory when that path is too long."""
        inside = self.root.resolve() / "sockets"
        if len(str(inside).encode()) + len("/policy-000") <= MAX_IPC_PATH_BYTES:
            return inside
        return Path(tempfile.gettempdir()) / f"seed-async-{self._digest()}"

    def _endpoint(self, topology: Topology, name: str, offset: int) -> str:
        if topology.transport.kind == "tcp":
            return f"tcp://127.0.0.1:{topology.transport.base_port + offset}"
        return f"ipc://{self.sockets()}/{name}"

    def buffer_endpoint(self, topology: Topology) -> str:
        """Where the buffer answers actors, analyzers, the learner and the evaluation actor."""
        return self._endpoint(topology, "buffer", 0)

    def weights_endpoint(self, topology: Topology) -> str:
        """Where the learner's publisher answers weight receivers."""
        return self._endpoint(topology, "weights", 1)

    def policy_endpoint(self, topology: Topology, index: int) -> str:
        """Where policy server `index` answers generation requests."""
        return self._endpoint(topology, f"policy-{index}", 2 + index)
