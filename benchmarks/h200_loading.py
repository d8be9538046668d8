"""How fast sharded safetensors get to a GPU, and how much memory that takes on the way.

python -m benchmarks.h200_loading MODEL_FOLDER [--layers 12] [--shards 4] [--way direct|plain] [--readers 8]

Writes a checkpoint of random bits in the model's shapes (kept for a second call), then loads it from the page cache.
"plain" reads one tensor at a time through safetensors. Prints one line of JSON.
"""

from __future__ import annotations

import argparse
import json
import math
import struct
import time
from pathlib import Path

import torch

from benchmarks.h200_start import host_mib
from pagedlc_engine.model import ModelSpec, load_model, read_spec
from pagedlc_engine.model.loaders.base import WeightSource, tensor_shapes
from pagedlc_engine.model.loaders.safetensors import SafetensorsWeights


def write(folder: Path, spec: ModelSpec, shards: int) -> int:
    """Write the checkpoint unless it is there; its bytes."""
    shapes = list(tensor_shapes(spec).items())
    per = -(-len(shapes) // shards)
    noise = torch.randint(-(2**15), 2**15, (1 << 25,), dtype=torch.int16).numpy().data.cast("B")
    weight_map, size = {}, 0
    for number in range(shards):
        header, at = {}, 0
        for name, shape in shapes[number * per : (number + 1) * per]:
            end = at + 2 * math.prod(shape)
            header[name] = {"dtype": "BF16", "shape": shape, "data_offsets": [at, end]}
            weight_map[name] = f"model-{number}.safetensors"
            at = end
        text = json.dumps(header).encode()
        text += b" " * (-len(text) % 8)
        file, size = folder / f"model-{number}.safetensors", size + at
        if not file.exists():
            with file.open("wb") as out:
                out.write(struct.pack("<Q", len(text)) + text)
                for start in range(0, at, len(noise)):
                    out.write(noise[: min(len(noise), at - start)])
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    return size


def main() -> None:
    """Write, load, print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model", type=Path)
    parser.add_argument("--folder", type=Path, default=Path("/tmp/pagedlc-loading"))
    parser.add_argument("--layers", type=int, default=12)
    parser.add_argument("--shards", type=int, default=4)
    parser.add_argument("--way", choices=["direct", "plain"], default="direct")
    parser.add_argument("--readers", type=int, default=SafetensorsWeights.readers)
    arguments = parser.parse_args()
    folder: Path = arguments.folder
    folder.mkdir(exist_ok=True)
    settings = json.loads((arguments.model / "config.json").read_text())
    settings["num_hidden_layers"] = arguments.layers
    settings.pop("layer_types", None)
    (folder / "config.json").write_text(json.dumps(settings))
    spec = read_spec(folder, "dummy")
    size = write(folder, spec, arguments.shards)
    SafetensorsWeights.readers = arguments.readers
    if arguments.way == "plain":
        SafetensorsWeights.read_into = WeightSource.read_into  # type: ignore[method-assign]
    device = torch.device("cuda")
    torch.empty(1, device=device)
    before = host_mib()
    begin = time.perf_counter()
    decoder = load_model(folder, spec, "safetensors", torch.bfloat16, device, None, 0, max_model_len=4096)
    torch.cuda.synchronize()
    seconds = time.perf_counter() - begin
    after = host_mib()
    found = {
        "way": arguments.way,
        "readers": arguments.readers,
        "gib": round(size / 2**30, 2),
        "seconds": round(seconds, 2),
        "gb_per_s": round(size / seconds / 1e9, 2),
        "host_peak_mib": after["peak"] - before["peak"],
        "host_own_mib": after["own"] - before["own"],
        "device_peak_over_model_mib": (torch.cuda.max_memory_allocated() - size) >> 20,
        "device_kept_over_model_mib": (torch.cuda.memory_allocated() - size) >> 20,
        "layers": len(decoder.layers),
    }
    print(json.dumps(found))


if __name__ == "__main__":
    main()
