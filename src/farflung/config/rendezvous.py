# SPDX-License-Identifier: Apache-2.0
"""What torch's rendezvous can be told in `rdzv_conf`, and what it would pass over in silence."""

from __future__ import annotations

from farflung.base.errors import ConfigError

_NUMBERS = (  # times are in seconds
    *("timeout", "read_timeout", "join_timeout", "last_call_timeout", "close_timeout", "heartbeat_timeout"),
    *("keep_alive_interval", "keep_alive_max_attempt"),
)
_WORDS = ("is_host", "store_type")


def check_rendezvous(conf: str) -> None:
    """Check that a text such as `timeout=60,is_host=true` has keys that torch knows."""
    for part in filter(None, conf.split(",")):
        key, _, value = (word.strip() for word in part.partition("="))
        if key not in (*_NUMBERS, *_WORDS):
            known = ", ".join((*_NUMBERS, *_WORDS))
            raise ConfigError(f"rdzv_conf holds {part!r}; each part must be key=value, with a key among {known}.")
        if key in _NUMBERS and not value.isdecimal():
            raise ConfigError(f"rdzv_conf holds {part!r}; it must be key=value with a whole number, {key}=60.")
