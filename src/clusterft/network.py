"""Is the hub within reach?

In: nothing. Out: a yes or no within seconds, and a context in which the hub's client does not try for most of a minute what
cannot work, but looks into its cache and says what is missing.
"""

from __future__ import annotations

import functools
import os
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from urllib.parse import urlparse

PROBE_SECONDS = 5.0


@functools.cache
def hub_reachable() -> bool:
    """True if the hub's host accepts a connection, or if a proxy makes that impossible to tell; False if offline is set."""
    from huggingface_hub import constants

    if constants.HF_HUB_OFFLINE:
        return False
    if any(os.environ.get(name) for name in ("HTTPS_PROXY", "https_proxy", "ALL_PROXY", "all_proxy")):
        return True
    address = urlparse(constants.ENDPOINT)
    try:
        socket.create_connection((address.hostname, address.port or 443), timeout=PROBE_SECONDS).close()
    except OSError:
        return False
    return True


@contextmanager
def hub_or_cache() -> Iterator[None]:
    """Within it the hub's client and `datasets` are offline if the hub is out of reach."""
    from huggingface_hub import constants

    before = constants.HF_HUB_OFFLINE
    constants.HF_HUB_OFFLINE = not hub_reachable()
    try:
        yield
    finally:
        constants.HF_HUB_OFFLINE = before
