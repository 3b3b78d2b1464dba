"""The small key-value store of torch through which processes find one another; it accepts whoever reaches its port."""

import os
from datetime import timedelta
from typing import Any


def use_interface(interface: str) -> None:
    """Have gloo, NCCL and TensorPipe use this network interface, unless the environment names another."""
    for library in ("GLOO", "NCCL", "TP"):
        os.environ.setdefault(f"{library}_SOCKET_IFNAME", interface)


def serve_store(host: str, timeout_s: float) -> Any:
    """Open a store at a free port of `host`; `.port` says which. It lives as long as the object."""
    from torch.distributed import TCPStore  # type: ignore[attr-defined]

    return TCPStore(host, 0, None, is_master=True, timeout=timedelta(seconds=timeout_s), wait_for_workers=False)


def connect_store(host: str, port: int, timeout_s: float) -> Any:
    """Connect to a store. Each operation raises RuntimeError after `timeout_s`, or when the other end is gone."""
    from torch.distributed import TCPStore  # type: ignore[attr-defined]

    return TCPStore(host, port, None, is_master=False, timeout=timedelta(seconds=timeout_s), wait_for_workers=False)


def prefixed(store: Any, prefix: str) -> Any:
    """A view of the store in which every key has a prefix."""
    from torch.distributed import PrefixStore  # type: ignore[attr-defined]

    return PrefixStore(prefix, store)
