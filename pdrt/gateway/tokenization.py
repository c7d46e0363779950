"""POST /tokenize and /detokenize, in vLLM's shapes."""

from __future__ import annotations

from starlette.requests import Request
from starlette.responses import Response

from pdrt.config import GatewayConfig
from pdrt.gateway.admission import Admission
from pdrt.gateway.http import JsonResponse, read_body
from pdrt.gateway.schema.answers import DetokenizeAnswer, TokenizeAnswer
from pdrt.gateway.schema.bodies import DetokenizeBody
from pdrt.gateway.schema.decoding import decode
from pdrt.gateway.served_model import ServedModel


class Tokenization:
    """Both endpoints. They count as requests while they run, as they cost what preparing one
    does."""

    def __init__(self, model: ServedModel, admission: Admission, config: GatewayConfig) -> None:
        self._model = model
        self._admission = admission
        self._bytes_max = config.api.body_bytes_max

    async def tokenize(self, request: Request) -> Response:
        with self._admission.preparing():
            body = await read_body(request, self._bytes_max)
            limits = self._admission.limits()
            tokens, texts = await self._model.tokenize(body, limits)
        return JsonResponse(TokenizeAnswer(len(tokens), limits.tokens_max, tokens, texts))

    async def detokenize(self, request: Request) -> Response:
        with self._admission.preparing():
            body = await read_body(request, self._bytes_max)
            limits = self._admission.limits()

            def detokenize() -> str:
                asked = decode(body, DetokenizeBody, off=False)
                self._model.check_name(asked.model)
                return self._model.decode(asked.tokens, limits)

            text = await self._model.beside(detokenize)
        return JsonResponse(DetokenizeAnswer(text))
