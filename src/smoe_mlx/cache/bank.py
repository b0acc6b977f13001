"""Slot banks: preallocated MLX arrays whose rows hold experts, and writable views of their bytes.

MLX reads a bank through its arrays; files are read into it through the views. Nothing ever assigns
to a bank through MLX: that could move the array away from under its views.
"""

from collections.abc import Sequence

import mlx.core as mx
import numpy as np

from ..store.layout import TensorSpec

# safetensors dtype names -> MLX, for what expert tensors can be made of.
MX_DTYPES = {
    "U8": mx.uint8, "U32": mx.uint32, "F16": mx.float16, "BF16": mx.bfloat16, "F32": mx.float32,
}  # fmt: skip


class SlotBank:
    """`slots` rows for experts made of `tensors`: one contiguous [slots, *shape] array a tensor.

    Attributes:
        arrays: (projection, kind) -> mx.array [slots, *shape].
    """

    def __init__(self, tensors: Sequence[TensorSpec], slots: int):
        self.tensors = tuple(tensors)
        self.slots = slots
        self.arrays = {
            (t.projection, t.kind): mx.zeros((slots, *t.shape), MX_DTYPES[t.dtype]) for t in tensors
        }
        mx.eval(list(self.arrays.values()))
        # A bf16 array has no numpy dtype, but its buffer can be seen as bytes. Taken on this
        # thread, once: the address stays the same as long as the array lives.
        self._views = [
            memoryview(np.frombuffer(memoryview(a), np.uint8))  # type: ignore[arg-type]
            for a in self.arrays.values()
        ]

    def rows(self, slot: int) -> list[memoryview]:
        """The writable bytes of one slot, a view per tensor, in the order of `tensors`."""
        return [
            view[slot * t.nbytes : (slot + 1) * t.nbytes]
            for view, t in zip(self._views, self.tensors, strict=True)
        ]

    @property
    def nbytes(self) -> int:
        return self.slots * sum(t.nbytes for t in self.tensors)
