"""Loading a model's weights and deriving the geometry of its KV."""

from __future__ import annotations

import inspect
import logging
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import msgspec
import torch
from torch import nn

from pdrt.config import ModelConfig
from pdrt.errors import ModelError
from pdrt.kv.layout import KvLayout
from pdrt.model import attention
from pdrt.model.identity import read_json
from pdrt.model.resources import choose_dtype, cpu_flags
from pdrt.model.support import check_supported

log = logging.getLogger(__name__)

DUMMY_SEED = 0
"""Seed of `load_format="dummy"`: prefill and decode workers must draw the same weights."""


class LoadedModel(msgspec.Struct, frozen=True):
    """A model that is ready to run over pages."""

    module: nn.Module
    """Called with input_ids and position_ids (1, tokens), logits_to_keep, forward_context."""
    layout: KvLayout


def load_model(directory: Path, model: ModelConfig, device: torch.device) -> LoadedModel:
    """Load the model in `directory`, in evaluation mode, without gradients, on `device`.

    Raises:
        ModelError: the architecture is not supported or the weights cannot be loaded.
    """
    from transformers import AutoConfig

    attention.register()
    check_supported(read_json(directory / "config.json"))
    try:
        config = AutoConfig.from_pretrained(directory, local_files_only=True)
    except (OSError, ValueError, KeyError) as error:
        raise ModelError(f"cannot read the model's configuration: {error}") from error
    _check_class(config)
    checkpoint = str(getattr(config, "dtype", None) or "float32").removeprefix("torch.")
    dtype = choose_dtype(model.dtype, checkpoint, device.type, cpu_flags())
    layout = kv_layout(config, model.page_size, dtype)
    module = (
        _random_weights(config, dtype)
        if model.load_format == "dummy"
        else _read_weights(directory, dtype)
    )
    module.eval().requires_grad_(False).to(device)
    log.info("loaded %s in %s (checkpoint: %s)", type(module).__name__, dtype, checkpoint)
    return LoadedModel(module, layout)


def kv_layout(config: Any, page_size: int, dtype: str) -> KvLayout:
    """Geometry of the KV of a transformers configuration."""
    heads = config.num_attention_heads
    return KvLayout(
        page_size=page_size,
        kv_heads=getattr(config, "num_key_value_heads", None) or heads,
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
    if not model_class._supports_attention_backend:
        raise ModelError(f"{name} is not supported: it does not use the attention interface")
    if "logits_to_keep" not in inspect.signature(model_class.forward).parameters:
        raise ModelError(f"{name} is not supported: it cannot compute the logits of single tokens")


def _read_weights(directory: Path, dtype: str) -> nn.Module:
    import transformers

    auto: Any = transformers.AutoModelForCausalLM
    with _quiet():
        try:
            module, report = auto.from_pretrained(
                directory,
                dtype=getattr(torch, dtype),
                attn_implementation=attention.ATTENTION_NAME,
                local_files_only=True,
                output_loading_info=True,
            )
        # A broken checkpoint raises whatever safetensors, torch or a quantizer stumbles over.
        except Exception as error:
            raise ModelError(f"cannot load the weights in {directory}: {error}") from error
    if missing := sorted(report["missing_keys"]):
        raise ModelError(f"the weights in {directory} lack {missing[0]} (of {len(missing)})")
    assert isinstance(module, nn.Module)
    return module


def _random_weights(config: Any, dtype: str) -> nn.Module:
    import transformers

    auto: Any = transformers.AutoModelForCausalLM
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(DUMMY_SEED)
        module = auto.from_config(
            config, dtype=getattr(torch, dtype), attn_implementation=attention.ATTENTION_NAME
        )
    assert isinstance(module, nn.Module)
    return module


@contextmanager
def _quiet() -> Iterator[None]:
    """Without transformers' progress bars, which tear a supervisor's log apart."""
    import transformers

    settings: Any = transformers.utils.logging
    was_enabled = settings.is_progress_bar_enabled()
    settings.disable_progress_bar()
    try:
        yield
    finally:
        if was_enabled:
            settings.enable_progress_bar()
