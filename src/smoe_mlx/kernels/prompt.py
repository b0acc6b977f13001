"""PromptExperts: many rows by the experts of a layer, as matrix products, by two kernels.

Rows come in the order of their slots. What is multiplied is x and the weights as T, as mlx-lm's
operations have them; sums are float32, and only the activation's result is rounded in between.
"""

from typing import NamedTuple

import mlx.core as mx

from .experts import (
    LETTERS,
    MODES,
    Arrays,
    Geometry,
    Kernel,
    backend,
    make_kernel,
)


class PromptTiling(NamedTuple):
    """How a kernel divides its work.

    simds: simdgroups in a threadgroup. rows: of a tile; columns: of a simdgroup; step: numbers of a
    row of weights at a time, whole chunks. All but the first are multiples of 16.
    """

    simds: int = 4
    rows: int = 64
    columns: int = 32
    step: int = 64

    @property
    def shared_nbytes(self) -> int:
        """Threadgroup memory."""
        return 2 * (self.rows + self.simds * self.columns) * (self.step + 8)


# 3, 5 and 6 bits come in chunks of 128 numbers.
ODD_BITS = PromptTiling(rows=32, columns=16, step=128)


def tiles(slots: mx.array, rows: int, experts: int) -> mx.array:
    """Where tiles of up to so many rows with one slot begin, then the number of rows.

    Args:
        slots: [n], in order. experts: no more than so many different ones.

    Returns:
        [tiles + 1] uint32. There may be more than there are tiles: they begin at n.
    """
    n = slots.size
    at = mx.arange(n, dtype=mx.uint32)
    new = mx.concatenate([mx.array([True]), slots[1:] != slots[:-1]])
    offset = at - mx.cummax(mx.where(new, at, 0))  # within the rows of its slot
    begins = mx.sort(mx.where(offset % rows == 0, at, n))
    most = min(n, n // rows + min(n, experts))
    return mx.concatenate([begins[:most], mx.array([n], mx.uint32)])


class PromptExperts:
    """Computes what `StreamingSwitchGLU` or `StreamingSwitchMLP` would, for many rows.

    Args:
        geometry: from `eligible`, and `takes` it.
        min_rows: calls with fewer rows an expert are left to the caller.
        tilings: of the first kernel and of the second.
    """

    def __init__(
        self,
        geometry: Geometry,
        min_rows: float = 0,
        tilings: tuple[PromptTiling, PromptTiling] | None = None,
    ):
        self.geometry, self.min_rows = geometry, min_rows
        up, down = (
            PromptTiling() if 32 % bits == 0 else ODD_BITS
            for bits, _ in (geometry.up, geometry.down)
        )
        self.tilings = tilings or (up, down)
        self._kernels: dict[bool, Kernel] = {}

    @staticmethod
    def takes(geometry: Geometry) -> bool:
        """Whether there are kernels: matrix products are of 16-bit numbers."""
        return geometry.dtype in (mx.bfloat16, mx.float16)

    def fits(self, x: mx.array, slots: mx.array, experts: int) -> bool:
        """Whether this call can, and should, be computed here."""
        return (
            slots.size >= max(1, self.min_rows * experts)
            and x.dtype == self.geometry.dtype
            and backend() is not None
        )

    def __call__(
        self, arrays: Arrays, x: mx.array, tokens: mx.array, slots: mx.array, experts: int
    ) -> mx.array:
        """x [..., D], slots [n] in order, tokens [n]: rows of x -> [n, D].

        Args:
            experts: no more than so many slots are among `slots`.
        """
        g, (up, down) = self.geometry, self.tilings
        slots = slots.astype(mx.uint32)
        begins = tiles(slots, up.rows, experts)
        h = self._launch(True, arrays, x.reshape(-1, g.hidden), tokens, slots, begins)
        if down.rows != up.rows:
            begins = tiles(slots, down.rows, experts)
        every = mx.arange(slots.size, dtype=mx.uint32)
        return self._launch(False, arrays, h, every, slots, begins)

    def _launch(
        self, first: bool, arrays: Arrays, x: mx.array, row: mx.array, slot: mx.array,
        tile: mx.array,
    ) -> mx.array:  # fmt: skip
        g = self.geometry
        tiling, (bits, group) = (self.tilings[0], g.up) if first else (self.tilings[1], g.down)
        if first:
            sides = {"up_proj": "u", "gate_proj": "g"} if g.gated else {"fc1": "u"}
        else:
            sides = {"down_proj" if g.gated else "fc2": "u"}
        gated, bias = len(sides) == 2, g.up_bias if first else g.down_bias
        inputs = {"inp": x, "row": row.astype(mx.uint32), "slot": slot, "tile": tile}
        for projection, side in sides.items():
            for kind, letter in LETTERS.items():
                if (projection, kind) in arrays:
                    inputs[letter + side] = arrays[projection, kind]
        kernel = self._kernels.get(first)
        if kernel is None:
            activation = g.activation if first else "u"
            kernel = make_kernel(backend() or "", "prompt", list(inputs), ["out"], activation)
            self._kernels[first] = kernel
        n = g.ffn if first else g.hidden
        constants = {
            "K": x.shape[-1], "N": n, "BITS": bits, "GROUP": group,
            "HOW": MODES[g.mode][1] if g.mode != "affine" else int(32 % bits == 0),
            "GATED": gated, "BIAS": bias, "SIMDS": tiling.simds, "ROWS": tiling.rows,
            "COLUMNS": tiling.columns, "STEP": tiling.step,
        }  # fmt: skip
        block = tiling.simds * tiling.columns // (2 if gated else 1)
        (out,) = kernel(
            inputs=list(inputs.values()),
            template=[("T", g.dtype), *((name, int(value)) for name, value in constants.items())],
            output_shapes=[(slot.size, n)],
            output_dtypes=[g.dtype],
            grid=(-(-n // block) * tiling.simds * 32, tile.size - 1, 1),
            threadgroup=(tiling.simds * 32, 1, 1),
        )
        return out
