"""How much may be going on at once, and what one request may ask for."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from pdrt.config import GatewayConfig
from pdrt.gateway.errors import invalid, overloaded, unavailable
from pdrt.gateway.hub import Hub
from pdrt.gateway.schema.bounds import Limits
from pdrt.model.identity import ModelIdentity


class Admission:
    """Requests that run, each choice one of them, and those whose body is being read or tokenized:
    at most `requests_max` together."""

    def __init__(self, hub: Hub, identity: ModelIdentity, config: GatewayConfig) -> None:
        self._hub = hub
        self._identity = identity
        self._config = config
        self._preparing = 0

    @contextmanager
    def preparing(self) -> Iterator[None]:
        """Raises ApiError when there is no room."""
        if self._hub.is_draining:
            raise unavailable("The gateway is shutting down")
        if self._preparing + self._hub.streams >= self._config.requests_max:
            raise overloaded(f"{self._config.requests_max} requests are in flight already")
        self._preparing += 1
        try:
            yield
        finally:
            self._preparing -= 1

    def check_choices(self, count: int) -> None:
        """Raises ApiError when so many can not begin, ever or now."""
        most = self._config.requests_max
        if count > most:
            raise invalid(f"{count} choices are more than run at once ({most})", "n")
        if self._preparing + self._hub.streams + count > most:
            raise overloaded(f"{count} choices are too many beside the requests in flight")

    def limits(self) -> Limits:
        """Of a request that comes now: workers may hold less context than the model."""
        own, api = self._identity.max_model_len, self._config.api
        tokens_max = min(own, self._hub.registry.max_model_len() or own)
        return Limits(
            tokens_max,
            api.choices_max,
            api.logprobs_max,
            api.grammar_bytes_max,
            self._identity.sampling,
        )
