"""What accelerators this machine has, asked of the driver itself: the core loads no torch."""

import ctypes

CUDA_DRIVER = "libcuda.so.1"


def num_cuda_devices() -> int:
    """Return how many CUDA devices a process started here would see; 0 without a driver.

    `CUDA_VISIBLE_DEVICES` counts, as the driver reads it.
    """
    try:
        driver = ctypes.CDLL(CUDA_DRIVER)
    except OSError:
        return 0
    count = ctypes.c_int(0)
    if driver.cuInit(0) or driver.cuDeviceGetCount(ctypes.byref(count)):
        return 0  # an error code: no device, or none that works
    return count.value
