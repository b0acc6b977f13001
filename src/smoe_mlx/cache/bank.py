"""Slot banks: preallocated MLX arrays whose rows hold experts, and writable views of their bytes.

MLX reads a bank through its arrays; files are read into it through the views. Nothing ever assigns
to a bank through MLX: that could move the array away from under its views. On CUDA the views are of
the device's own memory, and only an uploader may touch their bytes (store/cuda.py): there nothing
looks at an array on the host, either.
"""

import math
from collections.abc import Sequence

import mlx.core as mx
import numpy as np

from ..store.cuda import Uploader
from ..store.layout import TensorSpec
from ..store.reader import PAGE

# safetensors dtype names -> MLX, for what expert tensors can be made of.
MX_DTYPES = {
    "U8": mx.uint8, "U32": mx.uint32, "F16": mx.float16, "BF16": mx.bfloat16, "F32": mx.float32,
}  # fmt: skip


class SlotBank:
    """`slots` rows for experts made of `tensors`: one contiguous [slots, *shape] array a tensor.

    The arrays begin at page boundaries: direct I/O can then read into rows that fill whole pages,
    and copies from the page cache do not fall into x86's 4K aliasing (benchmarks/read.py: 1.4 GB/s
    where aligned memory takes 7). Metal's buffers begin there anyway.

    Attributes:
        arrays: (projection, kind) -> mx.array [slots, *shape].
    """

    def __init__(self, tensors: Sequence[TensorSpec], slots: int, uploader: Uploader | None = None):
        self.tensors = tuple(tensors)
        self.slots = slots
        self._uploader = uploader
        self.arrays: dict[tuple[str, str], mx.array] = {}
        self._views: list[memoryview] = []
        self._rows: dict[int, list[memoryview]] = {}
        for t in self.tensors:
            self._allocate(t)

    def _allocate(self, t: TensorSpec) -> memoryview:
        make = _page_aligned_zeros if mx.default_device() == mx.cpu else mx.zeros
        array = make((self.slots, *t.shape), MX_DTYPES[t.dtype])
        return self._add(t, array)

    def _add(self, t: TensorSpec, array: mx.array) -> memoryview:
        mx.eval(array)
        self.arrays[t.projection, t.kind] = array
        # Taken on this thread, once: the address stays the same as long as the array lives.
        view = _bytes_of(array).data if self._uploader is None else self._uploader.view(array)
        self._views.append(memoryview(view))
        return self._views[-1]

    def moved(self, slots: int, rows: Sequence[int]) -> "SlotBank":
        """A bank of `slots` rows, the first ones with the bytes of these rows of this bank.

        This bank is used up: each of its arrays is let go when it has been copied, so that there is
        never more than one of them beside the new ones. Graphs that read it keep what they read.
        """
        new = SlotBank((), slots, self._uploader)
        self.forget_rows()
        for t in self.tensors:
            source, key = self._views.pop(0), (t.projection, t.kind)
            if self._uploader is not None:  # the rows behind are copies of any one
                picked = [*rows, *[0] * (slots - len(rows))]
                new._add(t, self.arrays[key][mx.array(picked, mx.uint32)])
            else:
                target = new._allocate(t)
                for to, at in enumerate(rows):
                    target[to * t.nbytes : (to + 1) * t.nbytes] = source[
                        at * t.nbytes : (at + 1) * t.nbytes
                    ]
            del source, self.arrays[key]
        new.tensors = self.tensors
        return new

    def rows(self, slot: int) -> list[memoryview]:
        """The writable bytes of one slot, a view per tensor, in the order of `tensors`. (With an
        uploader, only that may touch them.)"""
        rows = self._rows.get(slot)
        if rows is None:
            rows = self._rows[slot] = [
                view[slot * t.nbytes : (slot + 1) * t.nbytes]
                for view, t in zip(self._views, self.tensors, strict=True)
            ]
        return rows

    def forget_rows(self) -> None:
        """Let go of the views of slots, 2 kB each, that are not read into again."""
        self._rows.clear()

    @property
    def nbytes(self) -> int:
        return self.slots * sum(t.nbytes for t in self.tensors)


def _bytes_of(array: mx.array) -> np.ndarray:
    """A writable view of an array's bytes. (bf16 has no numpy dtype, but its buffer has bytes.)"""
    return np.frombuffer(memoryview(array), np.uint8)  # type: ignore[arg-type]


def _page_aligned_zeros(shape: tuple[int, ...], dtype: mx.Dtype) -> mx.array:
    size, spare = math.prod(shape), PAGE // dtype.size
    if size + spare >= 1 << 31:  # MLX counts a dimension in 32 bits
        return mx.zeros(shape, dtype)
    flat = mx.zeros((size + spare,), dtype)
    skip = -_bytes_of(flat).ctypes.data % PAGE // dtype.size
    return flat[skip : skip + size].reshape(shape)  # shares the memory of `flat`
