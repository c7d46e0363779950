"""Reading one rank's part of a model's weights, and joining it to the other ranks' parts.

A rank reads from the checkpoint what `pdrt.model.sharding` leaves it, and transformers makes a
module of that, under a configuration with the rank's numbers of heads. Two things are left whole at
first: the head, as transformers gives it the embedding's size, and random weights, which are drawn
for the whole model so that they are those of one rank.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Protocol

import torch
from safetensors import safe_open
from torch import Tensor, nn

from pdrt.errors import ModelError
from pdrt.model.collectives import Collectives
from pdrt.model.identity import read_json
from pdrt.model.sharding import OnRankZero, Part, Shard, part_of, share

INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"
SUMMED_ATTENTION = ("self_attn.o_proj", "self_attn.dense")
"""Names, at the end, of the modules whose outputs are parts of what attention puts out."""
SUMMED_MLP = (".mlp",)
"""The same of an MLP, or of all its experts together: they are weighed before they are summed."""


class Sliced(Protocol):
    """A tensor in a file, of which a part may be read."""

    def get_shape(self) -> list[int]: ...

    def __getitem__(self, index: Any) -> Tensor: ...


def read_parts(directory: Path, shard: Shard) -> dict[str, Tensor]:
    """A rank's part of every tensor of a checkpoint, by the checkpoint's names.

    Raises:
        ModelError: a file is missing, or a tensor cannot be split.
        OSError, safetensors.SafetensorError: a file cannot be read.
    """
    parts: dict[str, Tensor] = {}
    for file in _files(directory):
        with safe_open(file, framework="pt") as tensors:
            for name in tensors.keys():  # noqa: SIM118 (not a mapping)
                sliced: Sliced = tensors.get_slice(name)
                parts[name] = _read(shard, name, sliced)
    return parts


def _files(directory: Path) -> list[Path]:
    """Those that transformers would read: other files may hold the same weights once more."""
    if (directory / SINGLE).exists():
        return [directory / SINGLE]
    files = set(read_json(directory / INDEX).get("weight_map", {}).values())
    if not files:
        raise ModelError(f"{directory / INDEX} names no files")
    return [directory / name for name in sorted(files)]


def cut(whole: Mapping[str, Tensor], shard: Shard) -> dict[str, Tensor]:
    """A rank's part of tensors in memory, which it does not keep alive."""
    return {name: _cut(shard, name, tensor) for name, tensor in whole.items()}


def _read(shard: Shard, name: str, tensor: Sliced) -> Tensor:
    shape = tensor.get_shape()
    match part_of(shard, name, shape):
        case Part(dimension, ranges):
            index = [slice(None)] * len(shape)
            pieces = [tensor[(*index[:dimension], slice(*each))] for each in ranges]
            return pieces[0] if len(pieces) == 1 else torch.cat(pieces, dimension)
        case OnRankZero() if shard.rank > 0:
            return torch.zeros_like(tensor[:])
        case _:
            return tensor[:] if shape else tensor[...]


def _cut(shard: Shard, name: str, tensor: Tensor) -> Tensor:
    match part_of(shard, name, tensor.shape):
        case Part(dimension, ranges):
            pieces = [tensor.narrow(dimension, first, end - first) for first, end in ranges]
            return torch.cat(pieces, dimension)
        case OnRankZero() if shard.rank > 0:
            return torch.zeros_like(tensor)
        case _:
            return tensor.clone()


def cut_head(module: nn.Module, shard: Shard) -> None:
    """Leave a rank its part of the vocabulary in the head, which is no longer the embedding."""
    model: Any = module
    head = model.get_output_embeddings()
    first, end = share(len(head.weight), shard.rank, shard.ranks)
    head.weight = nn.Parameter(head.weight.data[first:end].clone(), requires_grad=False)
    head.out_features = end - first
    if head.bias is not None:
        head.bias = nn.Parameter(head.bias.data[first:end].clone(), requires_grad=False)


def attach(module: nn.Module, collectives: Collectives) -> None:
    """Have a module sum over ranks where its layers are split, and gather its logits on rank 0.

    Raises:
        ModelError: its layers are not built as those that can be split.
    """
    model: Any = module
    vocabulary, layers = int(model.config.vocab_size), int(model.config.num_hidden_layers)

    def add(_: nn.Module, inputs: Any, output: Tensor) -> Tensor:
        return collectives.add(output.contiguous())

    def gather(_: nn.Module, inputs: Any, output: Tensor) -> Tensor:
        return collectives.gather(output[0], vocabulary)[None]

    for names in (SUMMED_ATTENTION, SUMMED_MLP):
        summed = list(_named(module, names))
        if len(summed) != layers:
            raise ModelError(
                f"{type(module).__name__}: {len(summed)} modules called {' or '.join(names)} in "
                f"{layers} layers; it cannot be split over ranks"
            )
        for part in summed:
            part.register_forward_hook(add)
    model.get_output_embeddings().register_forward_hook(gather)


def _named(module: nn.Module, ends: tuple[str, ...]) -> Iterator[nn.Module]:
    return (part for name, part in module.named_modules() if name.endswith(ends))
