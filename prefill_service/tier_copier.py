"""Moves the bytes that the host tier's books have moved."""

from __future__ import annotations

from engine.device.kv_pool import KVPool
from engine.device.page_copy import copy_pages
from prefill_service.host_tier import TierCopies

__all__ = ["TierCopier"]


class TierCopier:
    """Between the device pool and the host pool of a node; host: None where there is no host tier.

    Once a copy has failed no cached page can be trusted: every later call raises, too, which ends the engine.
    """

    def __init__(self, device: KVPool, host: KVPool | None):
        self._device = device
        self._host = host
        self._failure: Exception | None = None

    def execute(self, copies: TierCopies) -> None:
        """All of them, offloads first. Raises RuntimeError when one fails or has failed."""
        host = self._host
        if host is None:
            return
        if self._failure is None:
            try:
                copy_pages(self._device, copies.offloads.sources, host, copies.offloads.targets)
                copy_pages(host, copies.loads.sources, self._device, copies.loads.targets)
            except Exception as error:
                self._failure = error
        if self._failure is not None:
            raise RuntimeError("copying pages between device and host has failed") from self._failure
