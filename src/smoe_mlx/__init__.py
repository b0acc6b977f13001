"""Run Mixture-of-Experts models far larger than memory on MLX: experts stay on the SSD."""

from .cache.experts import SharedExpertCache
from .config import StreamingConfig
from .errors import (
    BudgetError,
    CheckpointChangedError,
    CheckpointError,
    ExpertReadError,
    ModelNotFoundError,
    NotFiniteError,
    RecipeError,
    SmoeError,
    TraceError,
    UnsupportedModelError,
    VaultError,
)
from .generate import generate, stream_generate
from .governor import resize
from .hot import prewarm
from .instrument import instrument
from .layers.switch import StreamingSwitchGLU, StreamingSwitchMLP
from .load import load, plan
from .panel import Panel
from .plan import MemoryPlan
from .sculptor.shatter import shatter
from .sculptor.verify import verify
from .stats import Stats, stats
from .store.safetensors import SafetensorsMmap
from .store.vault import Vault
from .tune import Tuning, tune

__version__ = "0.1.0"

__all__ = [
    "BudgetError",
    "CheckpointChangedError",
    "CheckpointError",
    "ExpertReadError",
    "MemoryPlan",
    "ModelNotFoundError",
    "NotFiniteError",
    "Panel",
    "RecipeError",
    "SafetensorsMmap",
    "SharedExpertCache",
    "SmoeError",
    "Stats",
    "StreamingConfig",
    "StreamingSwitchGLU",
    "StreamingSwitchMLP",
    "TraceError",
    "Tuning",
    "UnsupportedModelError",
    "Vault",
    "VaultError",
    "generate",
    "instrument",
    "load",
    "plan",
    "prewarm",
    "resize",
    "shatter",
    "stats",
    "stream_generate",
    "tune",
    "verify",
]
