"""FusedRouter: from a router's logits to experts and weights by one kernel."""

import mlx.core as mx

from .experts import DTYPES, MAX_TOKENS, MAX_TOP_K, Kernel, backend, make_kernel

MAX_EXPERTS = 1024  # 32 for each lane


class FusedRouter:
    """Softmax, top-k and renormalisation of few tokens, as several of mlx-lm's blocks do them.

    Args:
        experts, top_k: E and k.
        by_logits: the k largest logits are chosen, else the k largest of softmax in logits' dtype.
        norm: a token's weights add up to 1, else they are softmax over all experts.
        last: of equal experts the last are chosen and the order is ascending, as by
            `argpartition(p, kth=-k)[..., -k:]` on a GPU, else as by `argpartition(-p)[..., :k]`.
    """

    def __init__(self, experts: int, top_k: int, by_logits: bool, norm: bool, last: bool):
        self.experts, self.top_k = experts, top_k
        self.by_logits, self.norm, self.last = by_logits, norm, last
        self._kernel: Kernel | None = None

    def fits(self, logits: mx.array) -> bool:
        """Whether this call can be computed here."""
        return (
            logits.shape[-1] == self.experts <= MAX_EXPERTS
            and 0 < self.top_k <= min(MAX_TOP_K, self.experts)
            and 0 < logits.size <= MAX_TOKENS * self.experts
            and logits.dtype in DTYPES
            and backend() is not None
        )

    def __call__(self, logits: mx.array) -> tuple[mx.array, mx.array]:
        """logits [..., E] -> experts [..., k] uint32, weights [..., k] in logits' dtype."""
        if self._kernel is None:
            self._kernel = make_kernel(backend() or "", "route", ["logits"], ["ids", "scores"])
        rows, shape = logits.reshape(-1, self.experts), (*logits.shape[:-1], self.top_k)
        template = {
            "E": self.experts, "TOP_K": self.top_k, "BY_LOGITS": self.by_logits,
            "NORM": self.norm, "LAST": self.last,
        }  # fmt: skip
        ids, scores = self._kernel(
            inputs=[rows],
            template=[("T", logits.dtype), *((name, int(n)) for name, n in template.items())],
            output_shapes=[shape, shape],
            output_dtypes=[mx.uint32, logits.dtype],
            grid=(32, rows.shape[0], 1),
            threadgroup=(32, 1, 1),
        )
        return ids, scores
