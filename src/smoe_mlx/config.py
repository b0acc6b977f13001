"""StreamingConfig: every option of a streamed model in one place."""

import os
import re
from dataclasses import dataclass

from .cache.policy import POLICIES
from .errors import BudgetError
from .forward.decode import MODES
from .kernels.choose import KERNELS
from .store.reader import IO_MODES

_UNITS = {"": 1, "B": 1}
for _i, _p in enumerate("KMGT", start=1):
    _UNITS[_p] = _UNITS[_p + "B"] = 1000**_i
    _UNITS[_p + "IB"] = 1024**_i


def parse_bytes(text: str | int | float) -> int:
    """Bytes from "12GB" (10^9), "12GiB" (2^30), "800M" or a plain number.

    Raises:
        BudgetError: not a size.
    """
    number, unit = text, ""
    if isinstance(text, str):
        match = re.fullmatch(r"\s*(\d{1,15}(?:\.\d{1,9})?)\s*([A-Z]*)\s*", text.upper(), re.ASCII)
        number, unit = (float(match[1]), match[2]) if match else (0, "")
    ok = isinstance(number, (int, float)) and not isinstance(number, bool) and unit in _UNITS
    if not ok or not 1 <= number * _UNITS[unit] < 1 << 60:  # type: ignore[operator]
        raise BudgetError(
            f"{text!r:.40} is not a memory size. Write for example 12GB, 800MB or 16GiB."
        )
    return int(number * _UNITS[unit])


@dataclass(frozen=True)
class StreamingConfig:
    """How a model is streamed.

    Attributes:
        memory: ceiling for all that MLX allocates, in bytes or as "12GB". None or "auto": plan
            from what this machine has free.
        slots: instead of `memory`: an int is a number of experts over all layers, a float in
            (0, 1] a share of all of them.
        context: tokens of KV cache that the plan sets memory aside for. None: 4096, or what the
            model was made for if that is less.
        kv_bits, kv_group_size, quantized_kv_start: mlx-lm's options of these names, if generation
            is given them: the plan then sets aside less.
        prefill_step: prompt tokens that pass the model at a time. None: 2048 as mlx-lm, or less
            where the memory asks for it.
        hits_first: while experts of a token are being read, compute those that are in memory
            (not where `kernels` compute them: all at once take less time than twice some).
        lookahead: while a layer computes, read experts that the next one will probably want: its
            gate is asked early. Each layer stops by itself where that does not pay.
        spec: experts beyond a token's own that are read as bets for the next token, by their rank
            with the router.
        decode: how `stream_generate` decodes tokens. "auto" picks the fastest of "exact" (the host
            looks at the routing of each layer), "wait" (CUDA: the device waits in the middle of a
            token where it lacks experts), "lag1" and "token" (the host looks later, and does again
            what lacked an expert); all give the same bits. "lossy" leaves out experts that are not
            in memory: not the model's own answers.
        kernels: what computes the experts of up to 16 tokens on a GPU. "stock": mlx-lm's own
            operations, bit for bit. "fused": two kernels that round less, where they exist for
            this model and pass a self-test; "auto": where they are faster as well. Both: kernels
            for prompts too, where these are faster (docs/kernels.md). On a CPU all are "stock".
        threads: reads that may be under way beside the calling thread's own.
        io: how experts are read: "pread", "direct" (past the page cache) or "mmap".
        policy: which expert makes room for another: "lru" or "lfu" (docs/policies.md).
        usage: a file that remembers which experts decoding used most, written after each
            generation. At load, slots are filled in idle time, with these first, until a request.
            "auto": smoe-usage.json in the model's folder or, if that cannot be written to, in the
            user's cache folder. None: nothing is remembered (docs/hot-experts.md).
        hot_per_layer: the most used experts of each layer that are never evicted. They are chosen
            anew before each prompt. 0, since it loses more on some texts than it saves on others.
        govern: give slots back while the system is short of memory, and take them again later.
        tuned: where nothing of memory and reading is asked for, do as `smoe-mlx tune` found to be
            fastest for this model on this machine (docs/tuning.md).
        check: compare each record of a vault with its checksum when it is first read.
        debug: check the cache's bookkeeping at every step (slow).

    Raises:
        BudgetError: `memory` or `slots` is not understood, or both are given.
        ValueError: another option has a value that it cannot have.
    """

    memory: str | int | float | None = None
    slots: int | float | None = None
    context: int | None = None
    kv_bits: int | None = None
    kv_group_size: int = 64
    quantized_kv_start: int = 5000
    prefill_step: int | None = None
    hits_first: bool = True
    lookahead: bool = True
    spec: int = 0
    decode: str = "auto"
    kernels: str = "stock"
    threads: int = 8
    io: str = "pread"
    policy: str = "lru"
    usage: str | os.PathLike[str] | None = None
    hot_per_layer: int = 0
    govern: bool = False
    tuned: bool = True
    check: bool = False
    debug: bool = False

    def __post_init__(self) -> None:
        if self.memory == "auto":
            object.__setattr__(self, "memory", None)
        if self.memory is not None:
            if self.slots is not None:
                raise BudgetError("give memory or slots, not both")
            parse_bytes(self.memory)
        if self.slots is not None:
            if isinstance(self.slots, bool) or not isinstance(self.slots, (int, float)):
                raise BudgetError(f"slots={self.slots!r}: an int (experts) or a float in (0, 1]")
            if isinstance(self.slots, float) and not 0 < self.slots <= 1:
                raise BudgetError(
                    f"slots={self.slots}: a float is a share of all experts, in (0, 1]; "
                    "write an int for a number of experts"
                )
            if self.slots < 1 and isinstance(self.slots, int):
                raise BudgetError(f"slots={self.slots}: at least 1")
        if self.io not in IO_MODES:
            raise ValueError(f"io={self.io!r}: one of {', '.join(IO_MODES)}")
        if self.usage is not None and not isinstance(self.usage, (str, os.PathLike)):
            raise ValueError(f"usage={self.usage!r}: the name of a file, or 'auto'")
        if self.policy not in POLICIES:
            raise ValueError(f"policy={self.policy!r}: one of {', '.join(POLICIES)}")
        if self.decode not in MODES:
            raise ValueError(f"decode={self.decode!r}: one of {', '.join(MODES)}")
        if self.kernels not in KERNELS:
            raise ValueError(f"kernels={self.kernels!r}: one of {', '.join(KERNELS)}")
        for name, least in (
            ("context", 1), ("prefill_step", 1), ("threads", 0), ("spec", 0),
            ("hot_per_layer", 0), ("kv_bits", 2), ("kv_group_size", 32), ("quantized_kv_start", 0),
        ):  # fmt: skip
            value = getattr(self, name)
            if value is not None and (not isinstance(value, int) or value < least):
                raise ValueError(f"{name}={value!r}: a whole number from {least} on")
