"""Run Mixture-of-Experts models far larger than memory on MLX: experts stay on the SSD."""

from .cache.experts import SharedExpertCache
from .config import StreamingConfig
from .errors import (
    BudgetError,
    CheckpointChangedError,
    CheckpointError,
    ExpertReadError,
    ModelNotFoundError,
    SmoeError,
    UnsupportedModelError,
)
from .generate import generate, stream_generate
from .layers.switch import StreamingSwitchGLU, StreamingSwitchMLP
from .load import load, plan
from .plan import MemoryPlan
from .stats import Stats, stats
from .store.safetensors import SafetensorsMmap

__version__ = "0.1.0"

__all__ = [
    "BudgetError",
    "CheckpointChangedError",
    "CheckpointError",
    "ExpertReadError",
    "MemoryPlan",
    "ModelNotFoundError",
    "SafetensorsMmap",
    "SharedExpertCache",
    "SmoeError",
    "Stats",
    "StreamingConfig",
    "StreamingSwitchGLU",
    "StreamingSwitchMLP",
    "UnsupportedModelError",
    "generate",
    "load",
    "plan",
    "stats",
    "stream_generate",
]
