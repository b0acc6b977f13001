"""What MLX's default device can take, and whether MLX can be used at all."""

import os

import mlx.core as mx

from .errors import SmoeError
from .machine import available_memory

_used = _lost = False  # of the process, not of a model


def using_mlx() -> None:
    """Call it before MLX computes.

    Raises:
        SmoeError: in the child of a fork whose parent had used MLX. Its threads stayed there, and
            whatever MLX is asked for here would wait for them for ever.
    """
    global _used
    if _lost:
        raise SmoeError(
            "This process was forked from one that had used MLX, whose threads stayed there. Load "
            'the model after the fork only, or start the process by multiprocessing\'s "spawn".'
        )
    _used = True


def _forked() -> None:
    global _lost
    _lost = _used


os.register_at_fork(after_in_child=_forked)


def names() -> dict[str, str]:
    """What tells the default device from others."""
    return {k: str(v) for k, v in mx.device_info().items() if "name" in k or "arch" in k}


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
