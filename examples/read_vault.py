"""Read one expert from a vault with nothing but numpy, following docs/vault-format.md.

smoe-mlx shatter demo FOLDER
python examples/read_vault.py FOLDER/experts.smoe model.layers.0.mlp.switch_mlp 5
"""

import argparse
import json
import struct
import zlib

import numpy as np

DTYPES = {"U8": "u1", "U32": "<u4", "F16": "<f2", "BF16": "<u2", "F32": "<f4"}  # BF16: raw bits
ENTRY = np.dtype([("layer", "<u4"), ("expert", "<u4"), ("offset", "<u8"), ("length", "<u8"),
                  ("crc", "<u4"), ("zero", "<u4")])  # fmt: skip


def read_expert(path, layer_path, expert):
    """{"up_proj.weight": array, ...} of one expert."""
    with open(path, "rb") as f:
        first = f.read(64)
        magic, version, _, header_nbytes, count = struct.unpack_from("<8sIIQQ", first)
        if magic != b"SMOE-MLX" or version != 1 or zlib.crc32(first[:60]) != struct.unpack_from("<I", first, 60)[0]:  # fmt: skip # noqa: E501
            raise ValueError("not a vault of format 1")
        header = json.loads(f.read(header_nbytes))
        table = np.frombuffer(f.read(count * ENTRY.itemsize), ENTRY)
        numbered = [list(x.get("experts", range(x["num_experts"]))) for x in header["layers"]]
        found = [i for i, x in enumerate(header["layers"])
                 if x["path"] == layer_path and expert in numbered[i]]  # fmt: skip
        if not found:
            raise ValueError("there is no such expert")
        layer, place = found[0], numbered[found[0]].index(expert)
        (row,) = table[(table["layer"] == layer) & (table["expert"] == place)]
        f.seek(int(row["offset"]))
        record = f.read(int(row["length"]))
    out, crc = {}, 0
    for t in header["geometries"][header["layers"][layer]["geometry"]]["tensors"]:
        data = record[t["offset"] : t["offset"] + t["nbytes"]]
        crc = zlib.crc32(data, crc)
        name = f"{t['projection']}.{t['kind']}"
        out[name] = np.frombuffer(data, DTYPES[t["dtype"]]).reshape(t["shape"])
    if crc != row["crc"]:
        raise ValueError("the record is damaged")
    return out


if __name__ == "__main__":
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("vault", help="the file experts.smoe")
    parser.add_argument("layer", help="the path of a switch module")
    parser.add_argument("expert", type=int, help="its number")
    args = parser.parse_args()
    for name, array in read_expert(args.vault, args.layer, args.expert).items():
        print(f"{name:20} {array.dtype!s:8} {array.shape}")
