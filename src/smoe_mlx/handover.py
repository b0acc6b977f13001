"""A few numbers between host and device: routing comes to the host, slot numbers go back.

On unified memory MLX's own ways are right. With CUDA they are slow: an array that the host touches
moves to it a page at a time, and back when a kernel stumbles over it, and MLX's wait puts the
thread to sleep. On an H200, per layer: 360 us to read the routing, 90 more to send slot numbers.
There a kernel writes the numbers into pinned memory where the host looks for them, and slot numbers
go as arrays of 8 bytes, which MLX keeps where both sides reach them: 150 us for both.
"""

import ctypes
import functools
import math
import struct
import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

import mlx.core as mx

from .store.cuda import CudaError, Driver

PLACES = 256  # arrays that can be on their way to the host at once
LONGEST = 64  # numbers of one
SPIN_SECONDS = 0.001  # to look for them before going to sleep
SMALL = 4  # numbers of 16 bits that an array of 8 bytes holds


class Handover:
    """By MLX's own ways.

    Attributes:
        fills: an array of `blank` can be part of a graph before the host knows its numbers.
    """

    fills = True

    def post(self, arrays: Sequence[mx.array]) -> list[Any]:
        """Start to compute arrays of integers that the host will `take`."""
        mx.async_eval(arrays)  # type: ignore[no-untyped-call]
        return list(arrays)

    def take(self, posted: Any) -> list[int]:
        """The numbers of a posted array, in one list; waits until they are there."""
        return flat(posted.tolist(), posted.shape)

    def read(self, arrays: Sequence[mx.array]) -> list[list[int]]:
        """Both."""
        return [self.take(p) for p in self.post(arrays)]

    def array(self, values: Sequence[int], shape: tuple[int, ...]) -> mx.array:
        """Few non-negative integers as an array for operations that take indices."""
        nested: Any = list(values)
        if len(nested) != shape[-1]:
            return mx.array(nested, mx.uint32).reshape(shape)
        for _ in shape[1:]:  # no need for an operation that reshapes
            nested = [nested]
        return mx.array(nested, mx.uint32)

    def blank(self, shape: tuple[int, ...]) -> mx.array:
        """Zeros as an array for operations that take indices, to be filled before they run."""
        return self.array([0] * math.prod(shape), shape)

    def fill(self, blank: mx.array, values: Sequence[int]) -> None:
        """Put non-negative integers into an array of `blank`; nothing has read it so far."""
        memory = memoryview(blank).cast("B")  # type: ignore[arg-type]
        struct.pack_into(f"{len(values)}I", memory, 0, *values)


def flat(nested: Any, shape: tuple[int, ...]) -> list[int]:
    """The numbers of an array's `tolist()`, in one list."""
    for _ in shape[1:]:
        nested = nested[0] if len(nested) == 1 else [e for row in nested for e in row]
    return nested  # type: ignore[no-any-return]


class _Posted:
    """An array on its way to the host."""

    def __init__(self, owner: "CudaHandover", array: mx.array, place: int, tag: int):
        self.owner, self.array, self.place, self.tag = owner, array, place, tag
        self.done = array

    def __del__(self) -> None:
        if self.place >= 0:  # nobody took it: an error, or an interrupt
            self.owner.dropped.append((self.place, self.tag, self.array.size))


class CudaHandover(Handover):
    """By pinned memory: places of LONGEST words, each of which belongs to one array at a time.

    Every word carries the tag of this use of its place, so that no order of writes is relied on,
    and nothing that an earlier use left behind is taken for an answer. A place is used again only
    when all of its numbers have been seen.

    Raises:
        CudaError, OSError: there is no CUDA driver, or numbers do not arrive.
    """

    fills = False  # what the host has written to moves to the device page by page

    def __init__(self) -> None:
        address = Driver().pinned_for_good(4 * PLACES * LONGEST)
        memory = (ctypes.c_uint32 * (PLACES * LONGEST)).from_address(address)
        self._words = memoryview(memory).cast("B").cast("I")
        self._where = [mx.array([address + 4 * LONGEST * i], mx.uint64) for i in range(PLACES)]
        self._free = deque(range(PLACES))
        self.dropped = deque[tuple[int, int, int]]()  # (place, tag, how many numbers)
        self._tags = [0] * PLACES
        self._kernels: dict[tuple[int, ...], Callable[..., mx.array]] = {}
        mx.eval(self._where)
        self._post = mx.compile(_make_post())
        for numbers in [[0], [7, 65535, 1], list(range(LONGEST))] * 2:
            sent = self.array(numbers, (1, len(numbers)))
            if self.read([sent]) != [numbers] or len(self._free) < PLACES:
                raise CudaError("numbers do not arrive at the host")

    def post(self, arrays: Sequence[mx.array]) -> list[Any]:
        posted = [self._begin(a) for a in arrays]
        mx.async_eval([p.done for p in posted])  # type: ignore[no-untyped-call]
        return posted

    def _begin(self, array: mx.array) -> _Posted:
        if array.size > LONGEST:
            return _Posted(self, array, -1, 0)  # MLX's own way
        if not self._free:
            self._reclaim()
        try:
            posted = _Posted(self, array, self._free.pop(), 0)
        except IndexError:
            return _Posted(self, array, -1, 0)
        self._tags[posted.place] = posted.tag = (self._tags[posted.place] + 1) % 65536
        tag = mx.array(posted.tag << 16, mx.uint32)
        posted.done = self._post(array, self._where[posted.place], tag)
        return posted

    def _reclaim(self) -> None:
        """Places that nobody waits for, and that nobody writes to any more."""
        for _ in range(len(self.dropped)):
            place, tag, size = self.dropped.popleft()
            if self._look(place, tag, size) is None:
                self.dropped.append((place, tag, size))
            else:
                self._free.append(place)

    def take(self, posted: _Posted) -> list[int]:
        where = posted.place, posted.tag, posted.array.size
        if posted.place < 0:
            return super().take(posted.array)
        numbers = self._look(*where)
        asleep = time.perf_counter() + SPIN_SECONDS
        while numbers is None and time.perf_counter() < asleep:
            time.sleep(0)  # lets threads that read experts go on
            numbers = self._look(*where)
        if numbers is None:
            mx.eval(posted.done)
            numbers = self._look(*where)
        if numbers is None:
            return super().take(posted.array)
        posted.place = -1
        self._free.append(where[0])
        return numbers

    def _look(self, place: int, tag: int, size: int) -> list[int] | None:
        """The numbers, if all of them are there."""
        at = place * LONGEST
        if self._words[at + size - 1] >> 16 != tag:
            return None
        words = self._words[at : at + size].tolist()
        return None if any([w >> 16 != tag for w in words]) else [w & 65535 for w in words]

    def array(self, values: Sequence[int], shape: tuple[int, ...]) -> mx.array:
        if max(values) > 65535 or len(values) > LONGEST:
            return super().array(values, shape)
        numbers = list(values)
        parts = [mx.array(numbers[i : i + SMALL], mx.uint16) for i in range(0, len(numbers), SMALL)]
        kernel = self._kernels.get(shape)
        if kernel is None:
            kernel = self._kernels[shape] = mx.compile(_make_join(len(values), shape))
        return kernel(*parts)


@functools.cache
def _cuda_handover() -> Handover:
    try:
        return CudaHandover()
    except (CudaError, OSError, RuntimeError):  # the last: the kernels do not compile
        return Handover()


def make_handover() -> Handover:
    """What suits MLX's default device."""
    if mx.default_device() == mx.cpu or not mx.cuda.is_available():
        return Handover()
    return _cuda_handover()


def _make_post() -> Callable[..., mx.array]:
    kernel: Any = mx.fast.cuda_kernel(
        name="smoe_post",
        input_names=["numbers", "place", "tag"],
        output_names=["done"],
        source="""
            volatile unsigned int* to = (volatile unsigned int*)(place[0]);
            for (int i = 0; i < N; i++) {
              if ((unsigned long long)numbers[i] < 65536) {
                to[i] = tag[0] | (unsigned int)numbers[i];
              }
            }
            __threadfence_system();
            done[0] = tag[0];
        """,
    )

    def post(numbers: mx.array, place: mx.array, tag: mx.array) -> mx.array:
        one = (1, 1, 1)
        out: mx.array = kernel(
            inputs=[numbers, place, tag], template=[("N", numbers.size)], grid=one,
            threadgroup=one, output_shapes=[(1,)], output_dtypes=[mx.uint32],
        )[0]  # fmt: skip
        return out

    return post


def _make_join(count: int, shape: tuple[int, ...]) -> Callable[..., mx.array]:
    names = [f"part{i}" for i in range(-(-count // SMALL))]
    lines = [f"out[{i}] = {names[i // SMALL]}[{i % SMALL}];" for i in range(count)]
    kernel: Any = mx.fast.cuda_kernel(
        name=f"smoe_join_{count}", input_names=names, output_names=["out"], source="\n".join(lines)
    )

    def join(*parts: mx.array) -> mx.array:
        one = (1, 1, 1)
        out: mx.array = kernel(
            inputs=list(parts), grid=one, threadgroup=one, output_shapes=[shape],
            output_dtypes=[mx.uint32],
        )[0]  # fmt: skip
        return out

    return join
