"""The shared core: topology, messages, seams, transport, metrics, supervisor and command line; it never loads torch."""

__version__ = "0.1.0"
