"""Every error a user can meet. Each message names the file, tensor, layer or option at fault."""


class SmoeError(Exception):
    """Base of all errors that smoe_mlx raises on purpose."""


class CheckpointError(SmoeError, ValueError):
    """A checkpoint file is malformed, incomplete or inconsistent."""


class CheckpointChangedError(CheckpointError):
    """A checkpoint file was changed, replaced or removed while a model reads from it."""


class UnsupportedModelError(SmoeError, ValueError):
    """The model cannot be streamed as it is; the message says what to do instead."""


class ModelNotFoundError(SmoeError, FileNotFoundError):
    """No such local folder and no such Hub repository (or the Hub cannot be reached)."""


class ExpertReadError(SmoeError, OSError):
    """The bytes of an expert could not be read; nothing was computed with them."""


class NotFiniteError(SmoeError, ArithmeticError):
    """The model computed NaN: its weights are damaged, or overflow their type."""


class BudgetError(SmoeError, ValueError):
    """The memory or slot budget is too small or not understood; the message says what would do."""


class VaultError(CheckpointError):
    """A vault is malformed, incomplete, damaged or does not belong to its checkpoint."""


class TraceError(SmoeError, ValueError):
    """A routing trace is malformed, damaged, or has nothing in it."""


class RecipeError(SmoeError, ValueError):
    """A quantisation that MLX does not have, or a recipe that cannot be read."""
