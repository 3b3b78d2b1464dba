"""Statistics of success rates, as pure functions."""

import math

Z_95 = 1.96
"""Standard normal quantile of a two-sided 95 % interval."""


def wilson_interval(successes: int, n: int, z: float = Z_95) -> tuple[float, float]:
    """Return the Wilson score interval of a success rate (Wilson 1927).

    With p = successes / n: (p + z^2 / 2n -+ z sqrt(p (1 - p) / n + z^2 / 4n^2)) / (1 + z^2 / n). Unlike the normal
    interval it stays inside [0, 1] and has a width at 0 and n successes. n = 0 says nothing: (0, 1).
    """
    if not 0 <= successes <= n:
        raise ValueError(f"{successes} successes of {n}")
    if n == 0:
        return 0.0, 1.0
    rate = successes / n
    middle = rate + z**2 / (2 * n)
    spread = z * math.sqrt(rate * (1 - rate) / n + z**2 / (4 * n**2))
    scale = 1 + z**2 / n
    # At 0 and n successes one end is exact; rounding must not move it.
    low = 0.0 if successes == 0 else (middle - spread) / scale
    high = 1.0 if successes == n else (middle + spread) / scale
    return low, high
