"""`python run.py export DTYPE`: writes a checkpoint's weights as fp32, bf16 or fp16, in parts if they are large.

The files are those that Hugging Face's libraries read: model.safetensors, or parts and an index of their tensors.
"""

from functools import partial

import torch
from safetensors.torch import save_file

from ..core.checkpoint import tensors_to_export
from ..core.settings import CommandLine
from ..core.task import find_task
from ..errors import ConfigError
from ..files import run_directory, write_json, write_whole
from ..trainer import Checkpoints
from . import evaluate

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
PART_BYTES = 5 * 10**9


def main(line: CommandLine) -> int:
    """Write runs/<name>/export/<DTYPE>/. Whole numbers keep their type, and a tied tensor stands there once."""
    (kind,) = line.rest
    if kind not in DTYPES:
        raise ConfigError(f"export {kind}: must be one of {', '.join(DTYPES)}. Type: export bf16.")
    dtype, config, task = DTYPES[kind], line.load_config(), find_task()
    path = evaluate.check(config, task)
    checkpoints = Checkpoints(path.parent, config.checkpoint)
    model = task.build_model(config.model)
    weights = checkpoints.weights_of(checkpoints.load_to_evaluate(path), model)
    tensors = tensors_to_export(weights, model)
    types = {name: dtype if one.is_floating_point() else one.dtype for name, one in tensors.items()}
    sizes = {name: one.numel() * types[name].itemsize for name, one in tensors.items()}
    parts, size = [list[str]()], 0
    for name in tensors:
        if parts[-1] and size + sizes[name] > PART_BYTES:
            parts.append([])
            size = 0
        parts[-1].append(name)
        size += sizes[name]
    folder = run_directory(config.name) / "export" / kind
    folder.mkdir(parents=True, exist_ok=True)
    for former in folder.glob("model*"):
        former.unlink()
    files: dict[str, str] = {}
    for number, names in enumerate(parts, 1):
        numbers = f"-{number:05d}-of-{len(parts):05d}" * (len(parts) > 1)
        file = folder / f"model{numbers}.safetensors"
        part = {name: tensors[name].to(types[name]) for name in names}
        write_whole(file, partial(save_file, part, metadata={"format": "pt"}))
        files |= dict.fromkeys(names, file.name)
    if len(parts) > 1:
        index = {"metadata": {"total_size": sum(sizes.values())}, "weight_map": files}
        write_json(folder / "model.safetensors.index.json", index)
    print(f"{path}: {len(files)} tensors, {sum(sizes.values()) / 1e9:.3g} GB in {folder}")
    return 0
