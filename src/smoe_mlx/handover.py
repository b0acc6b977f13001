"""A few numbers between host and device: routing comes to the host, slot numbers go back.

On unified memory MLX's own ways are right. With CUDA they are slow: an array that the host touches
moves to it a page at a time, and back when a kernel stumbles over it, and MLX's wait puts the
thread to sleep. On an H200, per layer: 360 us to read the routing, 90 more to send slot numbers.
There a kernel writes the numbers into pinned memory where the host looks for them, and slot numbers
go as arrays of 8 bytes, which MLX keeps where both sides reach them: 150 us for both.

Or the device helps itself, in the middle of a graph (`ask`): a kernel looks up the slots of what
was routed in a table of the host's, and where one is missing it waits until the host has put slot
numbers beside the routing.
"""

import ctypes
import functools
import itertools
import math
import struct
import time
import weakref
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

import mlx.core as mx

from .store.cuda import CudaError, Driver

PLACES = 512  # arrays that can be on their way to the host at once
LONGEST = 64  # numbers of one
WORDS = 2 * LONGEST  # of a place
NOTHING = memoryview(bytes(4 * WORDS)).cast("I")
ASKED = -1  # in the place of how many numbers
SPIN_SECONDS = 0.001  # to look for them before going to sleep
MOST_WAIT_MICROSECONDS = 50_000  # of the device for an answer; then it goes on without
MOST_HEAR_SECONDS = 10.0  # of the host for a question
SMALL = 4  # numbers of 16 bits that an array of 8 bytes holds


class Table:
    """Where the device can look up the slots of a layer's experts. Here: nowhere."""

    def write(self, slots: Sequence[int]) -> None:
        """The slot of each expert, or -1. None may go while a graph that asks is computed, but for
        one that waits for an answer."""


class Question:
    """Arrays of integers that the host will `hear`, and what it may have to `answer`.

    Attributes:
        reply: [shape of the first array] for graphs: the slots, once they are known.
    """

    def __init__(self, arrays: Sequence[mx.array], reply: mx.array):
        self.arrays, self.reply = arrays, reply


class Handover:
    """By MLX's own ways.

    Attributes:
        fills: an array of `blank` can be part of a graph before the host knows its numbers.
        waits: so can a `reply`, and the graph be started: the device waits for the answer, if it
            can (`can_wait`).
    """

    fills = True
    waits = False

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

    def can_wait(self, numbers: mx.array, after: mx.array) -> bool:
        """Whether `ask` works with arrays of these types. Nothing may be waiting meanwhile."""
        return self.fills

    def begin(self) -> int:
        """The number of a new conversation: of questions that belong together."""
        return 0

    def table(self, experts: int) -> Table:
        """One for a layer of so many experts, all of them missing."""
        return Table()

    def ask(
        self, arrays: Sequence[mx.array], table: Table, after: mx.array, talk: int
    ) -> Question | None:
        """In a graph, the slots of a routing, the first one of these arrays of integers, all of
        which the host hears. None: that cannot be.

        Args:
            after: what has been computed when the host hears them.
            talk: a conversation.
        """
        return Question(arrays, self.blank(arrays[0].shape))

    def hear(
        self, question: Question, wanted: Callable[[], bool] = lambda: True
    ) -> tuple[list[list[int]], list[int] | None]:
        """(the numbers of each array, the slots that the device found itself; or None: it waits for
        an answer). Waits until they are there.

        Raises:
            TimeoutError: they do not come, or are not wanted any more.
        """
        return self.read(question.arrays), None

    def answer(self, question: Question, values: Sequence[int]) -> None:
        """Non-negative integers for the reply, which nothing has computed with so far."""
        self.fill(question.reply, values)

    def in_time(self, question: Question) -> bool:
        """Whether the device had waited long enough for the answer. Ask when it is done."""
        return True

    def end(self, talk: int) -> None:
        """Let the device wait no more for answers of a conversation and of all before it, but go on
        without."""


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


class _PinnedTable(Table):
    """[1 + E] words: E, and a slot or -1 for each expert."""

    def __init__(self, address: int, experts: int):
        memory = (ctypes.c_int32 * (1 + experts)).from_address(address)
        self._words = memoryview(memory).cast("B").cast("i")
        self._words[0] = experts
        self._slots = [0] * experts
        self.where = mx.array([address], mx.uint64)
        mx.eval(self.where)
        self.write([-1] * experts)

    def write(self, slots: Sequence[int]) -> None:
        if self._slots != slots:
            for e, (before, now) in enumerate(zip(self._slots, slots, strict=True)):
                if before != now:  # word by word: the device must see no half of one
                    self._words[1 + e] = now
            self._slots = list(slots)


class _Asked(Question):
    """A question in pinned memory."""

    def __init__(self, owner: "CudaHandover", place: int, tag: int, sizes: tuple[int, ...]):
        self.owner, self.place, self.tag, self.sizes = owner, place, tag, sizes

    def __del__(self) -> None:
        if self.place >= 0:
            self.owner.dropped.append((self.place, self.tag, ASKED))


class CudaHandover(Handover):
    """By pinned memory: places of words, each of which belongs to one array at a time.

    Every word carries the tag of this use of its place, so that no order of writes is relied on. A
    place is used again only when all of its numbers have been seen, or the device has done with it,
    and is empty then: tags come again.

    A place has LONGEST words for numbers on their way to the host, and as many for those that come
    back; in the last one the device writes whether it had them in time.

    Raises:
        CudaError, OSError: there is no CUDA driver, or numbers do not arrive.
    """

    fills = False  # what the host has written to moves to the device page by page
    waits = True

    def __init__(self) -> None:
        self._driver = Driver()
        self._spare: dict[int, list[int]] = {}  # experts -> addresses of tables that nobody has
        address = self._driver.pinned_for_good(4 * (PLACES * WORDS + 2))
        memory = (ctypes.c_uint32 * (PLACES * WORDS + 2)).from_address(address)
        self._words = memoryview(memory).cast("B").cast("I")
        self._where = [mx.array([address + 4 * WORDS * i], mx.uint64) for i in range(PLACES)]
        self._ended = mx.array([address + 4 * PLACES * WORDS], mx.uint64)
        self._talks = itertools.count(1)
        self._free = deque(range(PLACES))
        self.dropped = deque[tuple[int, int, int]]()  # (place, tag, how many numbers)
        self._tags = [0] * PLACES
        self._kernels: dict[tuple[int, ...], Callable[..., mx.array]] = {}
        mx.eval(self._where, self._ended)
        self._post = mx.compile(_make_post())
        self._ask = mx.compile(_make_ask())
        self._can_wait: dict[tuple[mx.Dtype, mx.Dtype], bool] = {}
        for numbers in [[0], [7, 65535, 1], list(range(LONGEST))] * 2:
            sent = self.array(numbers, (1, len(numbers)))
            if self.read([sent]) != [numbers] or len(self._free) < PLACES:
                raise CudaError("numbers do not arrive at the host")

    def can_wait(self, numbers: mx.array, after: mx.array) -> bool:
        kind = numbers.dtype, after.dtype
        if kind not in self._can_wait:  # kernels are compiled for each
            like = mx.zeros((1,), after.dtype)  # twice: the first time, it may start late
            self._can_wait[kind] = any(self._try_waiting(numbers.dtype, like) for _ in range(2))
        return self._can_wait[kind]

    def _try_waiting(self, dtype: mx.Dtype, after: mx.array) -> bool:
        """Whether a kernel sees what the host writes while it runs."""
        table = self.table(8)
        for numbers in [[7, 65535, 1], [5] * 8, [7, 5, 3]] * 2:
            found = [8 * n for n in numbers] if numbers == [7, 5, 3] else None
            table.write([-1, -1, -1, 24, -1, 40 if found else -1, -1, 56])
            sent = mx.array(numbers, dtype)
            question = self.ask([sent, sent // 2], table, after, self.begin())
            if question is None:
                return False
            twice = 2 * question.reply
            mx.async_eval(twice)  # type: ignore[no-untyped-call]
            try:
                heard = self.hear(question)
            except TimeoutError:
                return False
            if found is None:
                self.answer(question, numbers[::-1])
            mx.eval(twice)
            right = twice.tolist() == [2 * n for n in found or numbers[::-1]]
            right = self.in_time(question) and right
            if not right or heard != ([numbers, [n // 2 for n in numbers]], found):
                return False
        return True

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
        posted.tag = self._empty(posted.place)
        tag = mx.array(posted.tag << 16, mx.uint32)
        posted.done = self._post(array, self._where[posted.place], tag)
        return posted

    def _empty(self, place: int) -> int:
        """Remove what an earlier use left behind; returns the next one's tag, which is not 0."""
        self._words[place * WORDS : (place + 1) * WORDS] = NOTHING
        self._tags[place] = tag = self._tags[place] % 65535 + 1
        return tag

    def _reclaim(self) -> None:
        """Places that nobody waits for, and that nobody writes to any more."""
        for _ in range(len(self.dropped)):
            place, tag, size = self.dropped.popleft()
            if size == ASKED:
                done = self._words[(place + 1) * WORDS - 1] >> 16 == tag
            else:
                done = self._look(place, tag, size) is not None
            if not done:
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
        at = place * WORDS
        if self._words[at + size - 1] >> 16 != tag:
            return None
        words = self._words[at : at + size].tolist()
        return None if any([w >> 16 != tag for w in words]) else [w & 65535 for w in words]

    def begin(self) -> int:
        return next(self._talks) & 0xFFFFFFFF

    def end(self, talk: int) -> None:
        self._words[PLACES * WORDS] = talk

    def table(self, experts: int) -> Table:
        spare = self._spare.setdefault(experts, [])
        address = spare.pop() if spare else self._driver.pinned_for_good(4 * (1 + experts))
        table = _PinnedTable(address, experts)
        weakref.finalize(table, spare.append, address)
        return table

    def ask(
        self, arrays: Sequence[mx.array], table: Table, after: mx.array, talk: int
    ) -> Question | None:
        assert isinstance(table, _PinnedTable)
        sizes = tuple([a.size for a in arrays])
        if sum(sizes) >= LONGEST:
            return None
        if not self._free:
            self._reclaim()
        try:
            question = _Asked(self, self._free.pop(), 0, sizes)
        except IndexError:
            return None
        question.tag = self._empty(question.place)
        numbers, *guesses = arrays
        if len(guesses) > 1:
            guesses = [mx.concatenate([g.flatten() for g in guesses])]
        how_many = sizes[0] | sum(sizes[1:]) << 8
        tag = mx.array([question.tag << 16 | how_many, talk], mx.uint32)
        place = self._where[question.place]
        question.reply = self._ask(
            place, self._ended, table.where, tag, after, numbers, *(guesses or [numbers])
        )
        return question

    def hear(
        self, question: Question, wanted: Callable[[], bool] = lambda: True
    ) -> tuple[list[list[int]], list[int] | None]:
        assert isinstance(question, _Asked)
        where = question.place, question.tag, sum(question.sizes) + 1
        start = time.perf_counter()
        while (numbers := self._look(*where)) is None:
            passed = time.perf_counter() - start
            if passed > MOST_HEAR_SECONDS or not wanted():
                raise TimeoutError("the device does not ask")
            # 0 lets threads that read experts go on.
            time.sleep(0 if passed < SPIN_SECONDS else SPIN_SECONDS / 20)
        out, at = [], 0
        for size in question.sizes:
            out.append(numbers[at : at + size])
            at += size
        if numbers[-1]:
            return out, None
        start = question.place * WORDS + LONGEST
        return out, [w & 65535 for w in self._words[start : start + question.sizes[0]].tolist()]

    def answer(self, question: Question, values: Sequence[int]) -> None:
        assert isinstance(question, _Asked)
        words, at, tag = self._words, question.place * WORDS + LONGEST, question.tag << 16
        for i, value in enumerate(values):  # word by word: the device must see no half of one
            words[at + i] = tag | value

    def in_time(self, question: Question) -> bool:
        assert isinstance(question, _Asked)
        if question.place < 0:
            return False
        status = self._words[(question.place + 1) * WORDS - 1]
        if status >> 16 != question.tag:
            return False  # and its place stays taken
        self._free.append(question.place)
        question.place = -1
        return status & 65535 == 0

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


def _make_ask() -> Callable[..., mx.array]:
    # tag: {tag << 16 | how many numbers | how many guesses << 8, conversation}
    # ended: {the last conversation that the host ended, the last one that had to wait too long}
    kernel: Any = mx.fast.cuda_kernel(
        name="smoe_ask",
        input_names=["place", "ended", "table", "tag", "after", "numbers", "guesses"],
        output_names=["reply"],
        source=f"""
            volatile unsigned int* words = (volatile unsigned int*)(place[0]);
            volatile unsigned int* over = (volatile unsigned int*)(ended[0]);
            const unsigned int mark = tag[0] & 0xffff0000, talk = tag[1];
            const unsigned int n = tag[0] & 255, all = n + (tag[0] >> 8 & 255);
            const volatile int* slots = (const volatile int*)(table[0]);
            const unsigned int i = threadIdx.x;
            unsigned long long number = 0;
            int slot = -1;
            if (i < all) {{
              number = i < n ? numbers[i] : guesses[i - n];
            }}
            if (i < n && number < (unsigned long long)slots[0]) {{
              slot = slots[1 + number];
            }}
            const int asks = __syncthreads_or(i < n && slot < 0);
            if (i < n && !asks) {{
              words[{LONGEST} + i] = mark | (unsigned int)slot;
              __threadfence_system();  // before the number: who sees that reads this
            }}
            if (i == all) {{
              number = asks != 0;
            }}
            if (i <= all && number < 65536) {{
              words[i] = mark | (unsigned int)number;
            }}
            __threadfence_system();
            int late = 0;
            if (i < n && asks) {{
              unsigned long long start, now;
              asm volatile("mov.u64 %0, %globaltimer;" : "=l"(start));
              unsigned int word = words[{LONGEST} + i];
              while ((word & 0xffff0000) != mark) {{
                asm volatile("mov.u64 %0, %globaltimer;" : "=l"(now));
                const bool ended = (int)(over[0] - talk) >= 0 || over[1] == talk;
                if (ended || now - start > {MOST_WAIT_MICROSECONDS}000ull) {{
                  late = 1;
                  word = 0;
                  break;
                }}
                word = words[{LONGEST} + i];
              }}
              slot = word & 65535;
            }}
            if (i < n) {{
              reply[i] = slot;
            }}
            __threadfence_system();
            late = __syncthreads_or(late);
            if (i == 0) {{
              if (late) {{
                over[1] = talk;  // all that follows is for nothing
              }}
              words[{WORDS - 1}] = mark | late;
            }}
        """,
    )
    threads = (LONGEST, 1, 1)

    def ask(*inputs: mx.array) -> mx.array:
        out: mx.array = kernel(
            inputs=list(inputs), grid=threads, threadgroup=threads,
            output_shapes=[inputs[5].shape], output_dtypes=[mx.uint32],
        )[0]  # fmt: skip
        return out

    return ask


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
