"""Run Mixture-of-Experts models far larger than memory on MLX: experts stay on the SSD."""

from typing import TYPE_CHECKING

from .cache.experts import SharedExpertCache
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
from .layers.open import open_experts
from .layers.switch import StreamingSwitchGLU, StreamingSwitchMLP
from .store.safetensors import SafetensorsMmap
from .store.vault import Vault

try:
    from .config import StreamingConfig
    from .generate import generate, stream_generate
    from .governor import resize
    from .hot import prewarm
    from .instrument import instrument
    from .load import load, plan
    from .panel import Panel
    from .plan import MemoryPlan
    from .sculptor.shatter import shatter
    from .sculptor.verify import verify
    from .stats import Stats, stats
    from .tune import Tuning, tune
except ModuleNotFoundError as e:  # what is above serves models of one's own without mlx-lm
    if e.name != "mlx_lm":
        raise
    if not TYPE_CHECKING:

        def __getattr__(name):
            needs = " needs mlx-lm: pip install mlx-lm" if name in __all__ else ""
            raise AttributeError(f"smoe_mlx.{name}{needs or ': there is no such name'}")


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
    "open_experts",
    "plan",
    "prewarm",
    "resize",
    "shatter",
    "stats",
    "stream_generate",
    "tune",
    "verify",
]
