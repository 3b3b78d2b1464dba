"""Settings of all tests."""

from hypothesis import settings

# A shared machine can stall any example for a second; slowness is measured by benchmarks, not by deadlines here.
settings.register_profile("shared-machine", deadline=None)
settings.load_profile("shared-machine")
