"""What computes the logits of a step: one interface, and transformers' own forward behind it."""

from __future__ import annotations

from typing import Protocol

from torch import Tensor, nn

from pdrt.model.attention import ForwardContext


class Model(Protocol):
    """A loaded model that runs over pages."""

    @property
    def description(self) -> str:
        """What computes, for the log."""
        ...

    def logits(self, context: ForwardContext) -> Tensor:
        """Store the KV of a step's tokens, once per layer, and compute the logits that it wants.

        Returns:
            (`context.logits_to_keep`, vocabulary), of any floating type; valid until the next
            step, which may use the same memory.

        Raises:
            ModelError: the model asks for something that pages or kernels cannot give.
        """
        ...


class TransformersModel:
    """A model of transformers that attends over pages through its attention interface."""

    def __init__(self, module: nn.Module, description: str) -> None:
        """`module` is in evaluation mode, and calls `attention.paged_attention`."""
        self._module = module
        self.description = description

    def logits(self, context: ForwardContext) -> Tensor:
        """See `Model.logits`."""
        output = self._module(
            input_ids=context.token_ids[None],
            position_ids=context.positions[None],
            use_cache=False,
            logits_to_keep=context.logits_to_keep,
            forward_context=context,
        )
        context.check_complete()
        logits: Tensor = output.logits[0]
        return logits
