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
from pdrt.errors import ConfigError, ModelError
from pdrt.kv.layout import KvLayout
from pdrt.model import attention
from pdrt.model.identity import read_json
from pdrt.model.quantization import check_quantization, transformers_config
from pdrt.model.resources import choose_dtype, cpu_flags
from pdrt.model.support import check_supported, longrope_limit

log = logging.getLogger(__name__)

DUMMY_SEED = 0
"""Seed of `load_format="dummy"`: prefill and decode workers must draw the same weights."""


class LoadedModel(msgspec.Struct, frozen=True):
    """A model that is ready to run over pages."""

    module: nn.Module
    """Called with input_ids and position_ids (1, tokens), logits_to_keep, forward_context."""
    layout: KvLayout


def load_model(
    directory: Path, model: ModelConfig, device: torch.device, max_model_len: int
) -> LoadedModel:
    """Load the model in `directory`, in evaluation mode, without gradients, on `device`.

    Args:
        max_model_len: tokens of the longest sequence; decides the factors of a longrope model.

    Raises:
        ConfigError: `--quantization` cannot be had, or not for this model.
        ModelError: the architecture is not supported or the weights cannot be loaded.
    """
    from transformers import AutoConfig

    attention.register()
    raw = read_json(directory / "config.json")
    check_supported(raw)
    check_quantization(raw, model.quantization)
    try:
        config = AutoConfig.from_pretrained(
            directory, local_files_only=True, trust_remote_code=False
        )
    except (OSError, ValueError, KeyError) as error:
        raise ModelError(f"cannot read the model's configuration: {error}") from error
    _check_class(config)
    checkpoint = str(getattr(config, "dtype", None) or "float32").removeprefix("torch.")
    dtype = choose_dtype(model.dtype, checkpoint, device.type, cpu_flags())
    layout = kv_layout(config, model.page_size, dtype)
    if model.load_format == "dummy":
        module = _random_weights(config, dtype, model).to(device)
    else:
        module = _read_weights(directory, dtype, device, model)
    module.eval().requires_grad_(False)
    if (limit := longrope_limit(raw)) is not None and max_model_len > limit:
        _fix_long_factors(module, limit)
    megabytes = sum(t.nbytes for t in module.state_dict().values()) / 1e6
    log.info(
        "loaded %s: %.0f MB, dtype %s (checkpoint: %s), quantization %s",
        type(module).__name__, megabytes, dtype, checkpoint, model.quantization,
    )  # fmt: skip
    return LoadedModel(module, layout)


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


def _read_weights(
    directory: Path, dtype: str, device: torch.device, model: ModelConfig
) -> nn.Module:
    import transformers

    auto: Any = transformers.AutoModelForCausalLM
    settings: dict[str, Any] = {}
    if model.quantization is not None:
        settings["quantization_config"] = transformers_config(model.quantization, dtype)
    with _quiet():
        try:
            module, report = auto.from_pretrained(
                directory,
                dtype=getattr(torch, dtype),
                attn_implementation=attention.ATTENTION_NAME,
                # At once to where it stays: some quantized weights cannot be moved.
                device_map={"": device},
                local_files_only=True,
                trust_remote_code=False,
                use_safetensors=True,
                output_loading_info=True,
                **settings,
            )
        # A broken checkpoint raises whatever safetensors, torch or a quantizer stumbles over.
        except Exception as error:
            raise ModelError(f"cannot load the weights in {directory}: {error}") from error
    if missing := sorted(report["missing_keys"]):
        raise ModelError(f"the weights in {directory} lack {missing[0]} (of {len(missing)})")
    assert isinstance(module, nn.Module)
    return module


def _random_weights(config: Any, dtype: str, model: ModelConfig) -> nn.Module:
    import transformers

    if model.quantization is not None:
        raise ConfigError("--quantization needs weights; leave it or --load-format dummy out")
    auto: Any = transformers.AutoModelForCausalLM
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(DUMMY_SEED)
        module = auto.from_config(
            config, dtype=getattr(torch, dtype), attn_implementation=attention.ATTENTION_NAME
        )
    assert isinstance(module, nn.Module)
    return module


def _fix_long_factors(module: nn.Module, limit: int) -> None:
    """Rotate every token by the long factors; left alone, transformers chooses anew in every step,
    by the furthest position in the batch.

    Raises:
        ModelError: the model keeps its factors where we do not know of.
    """
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    rotaries: list[Any] = [
        part for part in module.modules() if getattr(part, "rope_type", None) == "longrope"
    ]
    if not rotaries or not all(hasattr(part, "original_inv_freq") for part in rotaries):
        raise ModelError(
            f"{type(module).__name__}: its longrope factors cannot be fixed; give a "
            f"--max-model-len of at most {limit}"
        )
    for rotary in rotaries:
        device = rotary.inv_freq.device
        # What it takes for the short ones, so that either choice is this one.
        rotary.original_inv_freq, _ = ROPE_INIT_FUNCTIONS["longrope"](
            rotary.config, device, seq_len=limit + 1
        )


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
