"""Loading a model: what is refused, which forward computes it, and the geometry of its KV."""

from __future__ import annotations

import contextlib
import ctypes
import inspect
import logging
from pathlib import Path
from typing import Any

import msgspec
import torch

from pdrt.config import ModelConfig
from pdrt.errors import ModelError
from pdrt.kv.layout import KvLayout, rank_layout
from pdrt.model import attention
from pdrt.model.attention import AttentionBackend
from pdrt.model.collectives import Collectives, RankPlace, join
from pdrt.model.forward import Model, TransformersModel
from pdrt.model.fused_check import FusedDiffersError, fuse
from pdrt.model.fused_structure import FUSED_TYPES, NotFusedError
from pdrt.model.identity import read_json
from pdrt.model.loader_weights import Checkpoint
from pdrt.model.native.attention import NativeAttention
from pdrt.model.native.library import Kernels, load_kernels
from pdrt.model.native.self_test import check_kernels
from pdrt.model.native.step import can_attend
from pdrt.model.quantization import check_quantization, checkpoint_method
from pdrt.model.resources import choose_dtype, cpu_flags
from pdrt.model.sdpa import SdpaBackend
from pdrt.model.shard_weights import attach
from pdrt.model.sharding import check_split, shard_of
from pdrt.model.support import check_supported, longrope_limit

log = logging.getLogger(__name__)


class LoadedModel(msgspec.Struct, frozen=True):
    """A model that is ready to run over pages."""

    model: Model
    backend: AttentionBackend
    """Who attends where transformers' forward calls; the fused decoder calls the kernels itself."""
    layout: KvLayout
    """Of the whole model."""
    rank_layout: KvLayout
    """Of what this rank's pool holds."""
    collectives: Collectives | None
    """Joins it to the other ranks, where there are any."""


def load_model(
    directory: Path,
    model: ModelConfig,
    device: torch.device,
    max_model_len: int,
    place: RankPlace | None = None,
) -> LoadedModel:
    """Load the model in `directory`, ready to run on `device`.

    Args:
        max_model_len: tokens of the longest sequence; decides the factors of a longrope model.
        place: among the ranks that share the model, all of which load it at the same time; None
            where there is one.

    Raises:
        ConfigError: `--quantization` cannot be had, or not for this model.
        ModelError: the architecture is not supported, the weights cannot be loaded, or not split.
        RanksLost: another rank failed to load.
    """
    from transformers import AutoConfig

    attention.register()
    raw = read_json(directory / "config.json")
    check_supported(raw)
    check_quantization(raw, model.quantization)
    quantization = model.quantization or checkpoint_method(raw)
    check_split(raw, 1 if place is None else place.ranks, quantization)
    try:
        config = AutoConfig.from_pretrained(
            directory, local_files_only=True, trust_remote_code=False
        )
    except (OSError, ValueError, KeyError) as error:
        raise ModelError(f"cannot read the model's configuration: {error}") from error
    _check_class(config)
    is_cpu = device.type == "cpu"
    kernels = load_kernels(cpu_flags(), check=check_kernels) if is_cpu else None
    is_fused = kernels is not None and config.model_type in FUSED_TYPES and quantization is None
    dtype = choose_dtype(model.dtype, checkpoint_dtype(config), device.type, cpu_flags(), is_fused)
    limit = longrope_limit(raw)
    is_long = limit is not None and max_model_len > limit
    is_split = place is not None and place.ranks > 1
    shard = shard_of(config, place.rank, place.ranks) if place is not None and is_split else None
    checkpoint = Checkpoint(
        directory, config, model, dtype, device, limit if is_long else None, shard
    )
    layout = kv_layout(config, model.page_size, dtype)
    return _choose_forward(checkpoint, layout, kernels, max_model_len, place)


def _choose_forward(
    checkpoint: Checkpoint,
    whole: KvLayout,
    kernels: Kernels | None,
    max_model_len: int,
    place: RankPlace | None,
) -> LoadedModel:
    """The fused decoder where it computes the model, else transformers' own forward; all ranks
    choose alike."""
    module, collectives, layout = checkpoint.read(), None, whole
    if place is not None and checkpoint.shard is not None:
        layout = rank_layout(whole, place.rank, place.ranks)
        collectives = join(place, checkpoint.device)
        attach(module, collectives)
    reason = "there are no compiled kernels"
    if kernels is not None and not can_attend(layout, checkpoint.device):
        kernels, reason = None, f"the kernels do not know {layout.dtype} heads of {layout.head_dim}"
    if kernels is not None:
        try:
            decoder = fuse(module, layout, kernels, max_model_len, collectives)
        except NotFusedError as error:
            reason = f"not known to the fused decoder: {error}"
        except FusedDiffersError as error:
            log.warning("reading the model again, without the fused decoder: %s", error)
            reason = str(error)
            module = checkpoint.read()
            if collectives is not None:
                attach(module, collectives)
        else:
            _give_back_freed_memory()
            log.info("forward: %s", decoder.description)
            return LoadedModel(decoder, SdpaBackend(), whole, layout, collectives)
    backend = SdpaBackend() if kernels is None else NativeAttention(kernels)
    name = "SDPA" if kernels is None else f"native {kernels.isa}"
    model = TransformersModel(module, f"transformers' own, {name} attention ({reason})")
    log.info("forward: %s", model.description)
    return LoadedModel(model, backend, whole, layout, collectives)


def _give_back_freed_memory() -> None:
    """To the system: what the original weights took would else stay with the allocator, for a
    worker that never again needs as much."""
    with contextlib.suppress(AttributeError):  # of glibc
        ctypes.CDLL(None).malloc_trim(0)


def checkpoint_dtype(config: Any) -> str:
    """What a transformers configuration says that its weights are."""
    return str(getattr(config, "dtype", None) or "float32").removeprefix("torch.")


def kv_layout(config: Any, page_size: int, dtype: str) -> KvLayout:
    """Geometry of the KV of a transformers configuration."""
    heads = config.num_attention_heads
    # How GPTBigCode says that all heads share one.
    shared = 1 if getattr(config, "multi_query", False) else None
    return KvLayout(
        page_size=page_size,
        kv_heads=shared or getattr(config, "num_key_value_heads", None) or heads,
        layers=config.num_hidden_layers,
        head_dim=getattr(config, "head_dim", None) or config.hidden_size // heads,
        dtype=dtype,
    )


def _check_class(config: Any) -> None:
    """Refuse a class that would not call our attention, or cannot compute only some logits."""
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING

    name = config.architectures[0]
    try:
        model_class: Any = MODEL_FOR_CAUSAL_LM_MAPPING[type(config)]
    except KeyError as error:
        raise ModelError(f"{name} is not supported: transformers has no causal model") from error
    if "logits_to_keep" not in inspect.signature(model_class.forward).parameters:
        raise ModelError(f"{name} is not supported: it cannot compute the logits of single tokens")
