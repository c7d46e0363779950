"""Weights of a checkpoint, read into modules of transformers: whole, or one rank's share."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import torch
from torch import nn

from pdrt.config import ModelConfig
from pdrt.errors import ConfigError, ModelError
from pdrt.model import attention
from pdrt.model.quantization import spare_odd_shapes, transformers_config
from pdrt.model.shard_weights import cut, cut_head, read_parts
from pdrt.model.sharding import Shard, local_config

log = logging.getLogger(__name__)

DUMMY_SEED = 0
"""Seed of `load_format="dummy"`: prefill and decode workers must draw the same weights."""


class Checkpoint(msgspec.Struct, frozen=True):
    """Weights that can be read, more than once if need be."""

    directory: Path
    config: Any
    model: ModelConfig
    dtype: str
    device: torch.device
    long_factors_after: int | None
    """Where a longrope model rotates by its long factors: the length that the short ones reach."""
    shard: Shard | None
    """What this rank takes of it; None: all."""

    def read(self) -> nn.Module:
        """A module of transformers, in evaluation mode and without gradients.

        Raises:
            ModelError: the weights cannot be loaded.
        """
        if self.shard is not None:
            module = self._read_shard(self.shard)
        elif self.model.load_format == "dummy":
            module = _random_weights(self.config, self.dtype, self.model).to(self.device)
        else:
            module = _read_weights(self.directory, self.dtype, self.device, self.model)
        module.eval().requires_grad_(False)
        if self.long_factors_after is not None:
            _fix_long_factors(module, self.long_factors_after)
        megabytes = sum(t.nbytes for t in module.state_dict().values()) / 1e6
        log.info(
            "loaded %s: %.0f MB, dtype %s, quantization %s",
            type(module).__name__, megabytes, self.dtype, self.model.quantization,
        )  # fmt: skip
        return module

    def _read_shard(self, shard: Shard) -> nn.Module:
        if self.model.load_format == "dummy":
            parts = cut(_random_weights(self.config, self.dtype, self.model).state_dict(), shard)
        else:
            with _naming(self.directory):
                parts = read_parts(self.directory, shard)
        module = _shard_module(self.directory, local_config(self.config, shard), parts, self.dtype)
        cut_head(module, shard)
        return module.to(self.device)


def _read_weights(
    directory: Path, dtype: str, device: torch.device, model: ModelConfig
) -> nn.Module:
    import transformers

    auto: Any = transformers.AutoModelForCausalLM
    settings: dict[str, Any] = {}
    if model.quantization is not None:
        settings["quantization_config"] = transformers_config(model.quantization, dtype)
    with _quiet(), _naming(directory):
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
    spare_odd_shapes(module)
    return _complete(module, report, directory)


def _shard_module(
    directory: Path, local: Any, parts: dict[str, torch.Tensor], dtype: str
) -> nn.Module:
    """A module of transformers with one rank's `parts`, on the CPU."""
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING

    model_class: Any = MODEL_FOR_CAUSAL_LM_MAPPING[type(local)]
    with _quiet(), _naming(directory):
        module, report = model_class.from_pretrained(
            None,
            config=local,
            state_dict=parts,
            dtype=getattr(torch, dtype),
            attn_implementation=attention.ATTENTION_NAME,
            output_loading_info=True,
        )
    return _complete(module, report, directory)


@contextlib.contextmanager
def _naming(directory: Path) -> Iterator[None]:
    """A broken checkpoint raises whatever safetensors, torch or a quantizer stumbles over."""
    try:
        yield
    except ModelError:
        raise
    except Exception as error:
        raise ModelError(f"cannot load the weights in {directory}: {error}") from error


def _complete(module: object, report: dict[str, Any], directory: Path) -> nn.Module:
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


@contextlib.contextmanager
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
