"""Where the bytes of every expert lie.

An `ExpertLayout` answers, for one layer: expert e consists of these tensors, and the bytes of each
are in that file at that offset. It serves stacked checkpoints (one tensor of all experts, sliced),
per-expert checkpoints (a tensor an expert) and vaults alike.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import pairwise, repeat

import numpy as np

from ..errors import CheckpointError
from .reader import MERGE_GAP_NBYTES, ReadRequest
from .safetensors import Checkpoint, TensorInfo


@dataclass(frozen=True)
class TensorSpec:
    """One tensor of one expert, e.g. `up_proj.scales`: dtype by its safetensors name."""

    projection: str
    kind: str
    dtype: str
    shape: tuple[int, ...]
    nbytes: int

    @cached_property
    def name(self) -> str:
        return f"{self.projection}.{self.kind}"


@dataclass(frozen=True, eq=False)
class ExpertLayout:
    """The experts of one layer on disk.

    Attributes:
        path: the switch module's path in the model, e.g. `model.layers.3.mlp.switch_mlp`.
        num_experts: E.
        tensors: what one expert is made of. Layers with equal `tensors` can share a slot bank.
        file_ids: [len(tensors), E] index into the reader's files.
        offsets: [len(tensors), E] bytes from the start of that file.
        checksums: [E] CRC-32 over each expert's tensors in their order, where the store has them.
        experts: the model's numbers of these experts, where a layer's experts are of several kinds
            and these are only some of them; None: 0 to E - 1.
    """

    path: str
    num_experts: int
    tensors: tuple[TensorSpec, ...]
    file_ids: np.ndarray = field(repr=False)
    offsets: np.ndarray = field(repr=False)
    checksums: np.ndarray | None = field(default=None, repr=False)
    experts: tuple[int, ...] | None = None

    def name(self, expert: int) -> str:
        """What an error calls this layout's expert number `expert`."""
        return f"expert {expert if self.experts is None else self.experts[expert]}"

    def reads(self, expert: int, buffers: Iterable[memoryview]) -> Iterator[ReadRequest]:
        """The reads that bring an expert's tensors into `buffers`, one for each of `tensors`."""
        files, offsets = self._places[expert]
        labels = zip(self._names, repeat(self.name(expert)), repeat(self.path))
        return zip(files, offsets, buffers, labels, strict=True)

    @cached_property
    def _places(self) -> list[tuple[list[int], list[int]]]:
        """[E] (files, offsets): lists, faster than arrays for a few experts."""
        return list(zip(self.file_ids.T.tolist(), self.offsets.T.tolist(), strict=True))

    @cached_property
    def apart(self) -> bool:
        """Whether the tensors of an expert lie so that no two can be read as one."""
        files, offsets = self._places[0]
        sizes = [t.nbytes for t in self.tensors]
        places = sorted(zip(files, offsets, sizes, strict=True))
        return all(
            file != other or offset + size + MERGE_GAP_NBYTES < start
            for (file, offset, size), (other, start, _) in pairwise(places)
        )

    @cached_property
    def _names(self) -> list[str]:
        return [t.name for t in self.tensors]

    @property
    def expert_nbytes(self) -> int:
        """Bytes of one expert."""
        return sum(t.nbytes for t in self.tensors)

    @property
    def nbytes(self) -> int:
        """Bytes of all experts of the layer."""
        return self.num_experts * self.expert_nbytes


def layout_from_checkpoint(
    checkpoint: Checkpoint,
    path: str,
    num_experts: int,
    sources: dict[tuple[str, str], str | Sequence[str]],
) -> ExpertLayout:
    """The layout of one layer, from the names of the tensors that hold its experts.

    Args:
        sources: (projection, kind) -> the name of a stacked tensor [E, ...], or the names of E
            tensors, one an expert.

    Raises:
        CheckpointError: tensors are missing, of different shapes, or held by two files.
    """
    specs, file_ids, offsets = [], [], []
    for (projection, kind), source in sources.items():
        names = [source] if isinstance(source, str) else source
        found = [_find(checkpoint, path, name) for name in names]
        first = found[0][1]
        if isinstance(source, str):
            if not first.shape or first.shape[0] != num_experts:
                raise CheckpointError(
                    f"{_file(checkpoint, names[0])}: tensor {names[0]!r} has shape {first.shape}, "
                    f"but {path} has {num_experts} experts."
                )
            shape, nbytes = first.shape[1:], first.nbytes // num_experts
            starts = [first.offset + e * nbytes for e in range(num_experts)]
            ids = [found[0][0]] * num_experts
        else:
            if len(names) != num_experts:
                raise CheckpointError(
                    f"{checkpoint.folder}: {path} has {num_experts} experts, but the checkpoint "
                    f"holds {len(names)} tensors like {names[0]!r}."
                )
            for name, (_, info) in zip(names, found, strict=True):
                if (info.dtype, info.shape) != (first.dtype, first.shape):
                    raise CheckpointError(
                        f"{_file(checkpoint, name)}: tensor {name!r} is {info.dtype} {info.shape}, "
                        f"but {names[0]!r} is {first.dtype} {first.shape}."
                    )
            shape, nbytes = first.shape, first.nbytes
            starts = [info.offset for _, info in found]
            ids = [i for i, _ in found]
        specs.append(TensorSpec(projection, kind, first.dtype, tuple(shape), nbytes))
        file_ids.append(ids)
        offsets.append(starts)
    return ExpertLayout(
        path,
        num_experts,
        tuple(specs),
        np.array(file_ids, np.int32),
        np.array(offsets, np.int64),
    )


def _file(checkpoint: Checkpoint, name: str) -> object:
    return checkpoint.files[checkpoint.tensors[name][0]].path


def _find(checkpoint: Checkpoint, path: str, name: str) -> tuple[int, TensorInfo]:
    if name not in checkpoint.tensors:
        raise CheckpointError(f"{checkpoint.folder}: tensor {name!r} of {path} is missing.")
    if name in checkpoint.repeated:
        a, b = checkpoint.repeated[name]
        raise CheckpointError(f"tensor {name!r} of {path} is both in {a} and in {b}: remove one.")
    return checkpoint.tensors[name]
