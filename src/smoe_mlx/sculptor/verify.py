"""verify(): is every record of a vault what was written, and what the source holds?"""

import os
from collections.abc import Callable
from pathlib import Path

import mlx.core as mx
import numpy as np

from ..device import using_mlx
from ..errors import VaultError
from ..hub import find_model
from ..skeleton import Switch, build_skeleton
from ..store.files import check_links
from ..store.layout import ExpertLayout
from ..store.safetensors import Checkpoint
from ..store.vault import VAULT_FILE, Vault
from .shatter import fingerprint, label

Progress = Callable[[int, int], None]


def verify(
    dst: str | os.PathLike[str],
    source: str | os.PathLike[str] | None = None,
    trust_remote_code: bool = False,
    progress: Progress | None = None,
) -> int:
    """Check a vault from its first byte to its last.

    Args:
        dst: the folder that `shatter` made, or its vault file.
        source: the checkpoint that it was made from: its version is compared, and, where the
            experts' bytes were kept, every byte of them.
        trust_remote_code: run Python code that lies in the source's folder.
        progress: called as (records done, records in all).

    Returns:
        The number of records.

    Raises:
        VaultError: naming the first record that is damaged, or what else does not fit.
        CheckpointError: a link in the folder leads out of it.
    """
    path = Path(dst)
    if path.is_dir():
        check_links(path)
        path /= VAULT_FILE
    with Vault(path) as vault:
        for i in range(len(vault.table)):
            vault.verify_record(i)
            if progress is not None:
                progress(i + 1, len(vault.table))
        if source is not None:
            _compare(vault, find_model(source), trust_remote_code)
        return len(vault.table)


def _compare(vault: Vault, folder: Path, trust_remote_code: bool) -> None:
    using_mlx()
    checkpoint = Checkpoint(folder)
    try:
        if [fingerprint(f) for f in checkpoint.files] != vault.header.get("source"):
            raise VaultError(
                f"{vault.path} was made from another version of {folder}: names, sizes or headers "
                "of its files differ."
            )
        skeleton = build_skeleton(
            folder, checkpoint, trust_remote_code=trust_remote_code, keep_arrays=True
        )
        requantised = set(vault.header.get("requantised") or ())
        if {x.path for x in vault.layouts} != {s.path for s in skeleton.switches}:
            raise VaultError(f"{vault.path} does not have the layers of {folder}.")
        for switch in skeleton.switches:
            for layout in vault.layouts:
                if layout.path == switch.path:
                    _compare_layer(vault, layout, switch, requantised, folder)
            switch.arrays.clear()
    finally:
        checkpoint.close()


def _compare_layer(
    vault: Vault, layout: ExpertLayout, switch: Switch, requantised: set[str], folder: Path
) -> None:
    for t, offsets in zip(layout.tensors, layout.offsets, strict=True):
        array = switch.arrays.get((t.projection, t.kind))
        if array is None or label(layout.path, t.projection, layout.experts) in requantised:
            continue  # quantised anew: there is nothing to compare it with
        if layout.experts is not None:
            array = array[mx.array(layout.experts)]
        else:
            del switch.arrays[t.projection, t.kind]  # so that nothing keeps it afterwards
        array = mx.contiguous(array)
        data = np.frombuffer(memoryview(array), np.uint8)  # type: ignore[arg-type]
        rows = data.reshape(layout.num_experts, -1)
        for e, (offset, row) in enumerate(zip(offsets.tolist(), rows, strict=True)):
            if vault.pread(t.nbytes, offset) != row.tobytes():
                raise VaultError(
                    f"{vault.path}: {t.name} of {layout.name(e)} of {layout.path} is not what "
                    f"{folder} holds."
                )
