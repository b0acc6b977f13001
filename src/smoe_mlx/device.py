"""What MLX's default device can take."""

import mlx.core as mx

from .machine import available_memory


def max_buffer_nbytes() -> int:
    """The largest array that the default device takes, in bytes."""
    info = mx.device_info()
    return int(info.get("max_buffer_length", 1 << 46))


def available_nbytes() -> int:
    """Bytes that MLX could allocate now without swapping: of the system, and of the device."""
    info = mx.device_info()
    if "free_memory" in info:  # a device with memory of its own (CUDA)
        return int(info["free_memory"])
    most = int(info.get("max_recommended_working_set_size", 1 << 62))  # Metal
    return min(available_memory(), most)
