"""A fused decoder out of a loaded model, and whether it computes what transformers does.

That is tried on the model itself: a few tokens go through transformers' forward, the weights are
packed, and the same tokens go through the fused decoder. The first pass also tells what the layers
ask of attention.
"""

from __future__ import annotations

import logging
from typing import Any

import torch
from torch import Tensor, nn

from pdrt.kv.layout import KvLayout
from pdrt.kv.pool import KvPool
from pdrt.model.attention import AttentionBackend, ForwardContext, LayerCall
from pdrt.model.batch import Row
from pdrt.model.collectives import Collectives
from pdrt.model.forward import Model, TransformersModel
from pdrt.model.fused import FusedDecoder
from pdrt.model.fused_structure import check_kind, recognize
from pdrt.model.native.library import Kernels
from pdrt.model.native.linear import choose_linear
from pdrt.model.resources import cpu_flags
from pdrt.model.sdpa import SdpaBackend

log = logging.getLogger(__name__)

FLOAT32_TOLERANCE = 1e-4
"""Of `relative_difference`; SmolLM2-135M comes to 5e-6."""
BFLOAT16_TOLERANCE = 0.1
"""The same in bfloat16, where transformers rounds after every operation: SmolLM2-135M comes to
0.03, nearly all of it transformers' distance from its own float32."""
FAR_TOKENS_MAX = 1024
"""Position that the check goes to: enough to tell rotations apart, and cheap."""
FIRST_TOKENS = 8
CHUNK_TOKENS = 3
CHECK_SEED = 5
PAST_PAGE = 0


class FusedDiffersError(Exception):
    """The fused decoder does not compute what transformers does; says by how much."""


class Check:
    """Two steps: the first page of a prompt; then a chunk and a decode step far on in other
    sequences, to which that page stands for all that came before."""

    def __init__(self, layout: KvLayout, vocabulary: int, max_model_len: int) -> None:
        self._layout = layout
        self._generator = torch.Generator().manual_seed(CHECK_SEED)
        self._vocabulary = vocabulary
        self._pages = PAST_PAGE
        first = min(FIRST_TOKENS, layout.page_size, max_model_len)
        chunk, far = min(CHUNK_TOKENS, max_model_len), min(FAR_TOKENS_MAX, max_model_len)
        self._steps = [
            [self._row(first, 0)],
            [self._row(chunk, far - chunk), self._row(1, far // 2)],
        ]

    def _row(self, tokens: int, start: int) -> Row:
        past = start // self._layout.page_size
        written = self._layout.pages_for(start + tokens) - past
        pages = [PAST_PAGE] * past + list(range(self._pages, self._pages + written))
        self._pages += written
        ids = torch.randint(self._vocabulary, (tokens,), generator=self._generator).tolist()
        # What is scored does not matter: it asks for the logits of every token.
        return Row(ids, start, pages, sampling=None, scored=ids)

    @torch.inference_mode()
    def logits(self, model: Model, backend: AttentionBackend) -> Tensor:
        """(tokens, vocabulary) float32, of all tokens, as a model computes them."""
        pool = KvPool(self._layout, self._pages, torch.device("cpu"))
        try:
            contexts = [ForwardContext(pool, rows, backend) for rows in self._steps]
            return torch.cat([model.logits(context).float().clone() for context in contexts])
        finally:
            pool.close()


class Recorder:
    """An attention backend that also keeps what each layer asked for."""

    def __init__(self, inner: AttentionBackend) -> None:
        self._inner = inner
        self.calls: list[LayerCall] = []

    def attend(self, context: ForwardContext, call: LayerCall) -> Tensor:
        """See `AttentionBackend.attend`."""
        self.calls.append(call)
        return self._inner.attend(context, call)


def fuse(
    module: nn.Module,
    layout: KvLayout,
    kernels: Kernels,
    max_model_len: int,
    collectives: Collectives | None = None,
) -> FusedDecoder:
    """A fused decoder with the weights of `module`, which has none afterwards.

    Args:
        module: of transformers, on the CPU, calling our attention.
        layout: of this rank's pages.
        max_model_len: positions that are ever rotated.
        collectives: with the other ranks that hold a part of the model. All of them do this, and
            come to the same end.

    Raises:
        NotFusedError: the model is not known, and left as it is.
        FusedDiffersError: the decoder computes something else; the weights are gone.
    """
    config: Any = module.config
    check_kind(config)
    check = Check(layout, config.vocab_size, max_model_len)
    recorder = Recorder(SdpaBackend())
    expected = check.logits(TransformersModel(module, "transformers"), recorder)
    structure = recognize(module, recorder.calls[: layout.layers], max_model_len)
    dtype: torch.dtype = getattr(torch, layout.dtype)
    plan = choose_linear(dtype, torch.device("cpu"), cpu_flags(), kernels)
    # What the structure holds is the only reference now: a layer's memory is free once packed.
    for parameter in module.parameters():
        parameter.data = parameter.data.new_empty(0)
    decoder = FusedDecoder(structure, layout, kernels, plan, collectives)
    del structure
    difference = relative_difference(check.logits(decoder, recorder), expected)
    log.info("fused decoder: logits differ by %.1e of their deviation", difference)
    tolerance = FLOAT32_TOLERANCE if layout.dtype == "float32" else BFLOAT16_TOLERANCE
    # Not a number is not within it either. Each rank compares what it has of the logits.
    is_off = not difference <= tolerance
    if is_off if collectives is None else collectives.any(is_off):
        raise FusedDiffersError(f"its logits differ by {difference:.1e} of their deviation")
    return decoder


def relative_difference(actual: Tensor, expected: Tensor) -> float:
    """Root mean square of the difference, in units of the deviation of what is expected."""
    difference = (actual - expected).square().mean().sqrt()
    return float(difference / expected.std())
