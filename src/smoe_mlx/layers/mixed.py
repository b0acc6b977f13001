"""MixedSwitch: a layer whose experts are quantised in several ways.

One operation computes experts of one geometry. So each kind has a streaming switch of its own, and
the routed pairs are dealt out to them and put back in the caller's order.
"""

from collections.abc import Sequence

import mlx.core as mx
import mlx.nn as nn
import numpy as np

from ..device import using_mlx
from .switch import put_back


class MixedSwitch(nn.Module):
    """In the place of mlx-lm's switch layer: `(x [..., D], indices [..., k]) -> [..., k, D]`.

    Args:
        parts: (the experts' numbers in the model, the switch that holds them in that order).
    """

    def __init__(self, parts: Sequence[tuple[Sequence[int], nn.Module]]):
        super().__init__()
        count = sum(len(experts) for experts, _ in parts)
        self._part_of = np.empty(count, np.int32)
        self._number_in_part = np.empty(count, np.uint32)
        for i, (experts, _) in enumerate(parts):
            self._part_of[list(experts)] = i
            self._number_in_part[list(experts)] = np.arange(len(experts))
        self._parts = [switch for _, switch in parts]  # not children: they have no parameters

    def __call__(self, x: mx.array, indices: mx.array) -> mx.array:
        """As the switch that it replaces; raises what its parts raise."""
        using_mlx()
        ids = np.array(indices)
        part_of, numbers = self._part_of[ids], self._number_in_part[ids]
        if (part_of == part_of.flat[0]).all():
            alone: mx.array = self._parts[int(part_of.flat[0])](x, mx.array(numbers))
            return alone
        k, part_of, numbers = ids.shape[-1], part_of.ravel(), numbers.ravel()
        rows = x.reshape(-1, x.shape[-1])
        outputs, orders = [], []
        for i, switch in enumerate(self._parts):
            pairs = np.flatnonzero(part_of == i)
            if pairs.size:
                tokens = mx.array((pairs // k).astype(np.uint32))
                outputs.append(switch(rows[tokens], mx.array(numbers[pairs])[:, None])[:, 0])
                orders.append(pairs)
        return put_back(outputs, orders, ids.shape)
