"""The CURVE keys of a run (`transport.curve`): one pair a process, made by the launcher, readable by its owner only.

`FOLDER/NAME.key` holds the secret of one process (`actor-1`), `FOLDER/public.json` the public keys of all. A server of
the run lets in the processes of the run and nobody else.
"""

import json
import shutil
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from seed_async.transport.curve import ClientCurve, KeyFileError, KeyPair, ServerCurve

_PUBLIC = "public.json"


def create_keys(folder: Path, names: Iterable[str]) -> None:
    """Make new keys for the processes `names`; keys of an earlier launch are thrown away."""
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(mode=0o700, parents=True)
    public = {}
    for name in names:
        pair = KeyPair.create()
        pair.save(folder / f"{name}.key")
        public[name] = pair.public.decode()
    (folder / _PUBLIC).write_text(json.dumps(public, indent=1) + "\n", encoding="utf-8")


@dataclass(frozen=True)
class RunKeys:
    """The keys of one process, and the public ones of all."""

    own: KeyPair
    public: dict[str, bytes]

    @staticmethod
    def load(folder: Path, name: str) -> "RunKeys":
        """Read what the launcher has made for the process `name`. Raises KeyFileError."""
        own = KeyPair.load(folder / f"{name}.key")
        try:
            public = json.loads((folder / _PUBLIC).read_text(encoding="utf-8"))
            keys = {str(other): str(key).encode("ascii") for other, key in public.items()}
        except (OSError, ValueError, AttributeError) as error:
            raise KeyFileError(f"{folder / _PUBLIC}: {error}") from error
        return RunKeys(own, keys)

    def server(self) -> ServerCurve:
        """Keys for a socket that this process binds."""
        return ServerCurve(self.own, frozenset(self.public.values()))

    def client(self, server: str) -> ClientCurve:
        """Keys for a connection to the process `server`. Raises KeyFileError when the run has no such process."""
        if server not in self.public:
            raise KeyFileError(f"the run has no key of {server}")
        return ClientCurve(self.own, self.public[server])
