# SPDX-License-Identifier: Apache-2.0
"""Where `hf://namespace/bucket/run` is: a Storage Bucket of the Hugging Face Hub, behind a gateway for S3's protocol.

What the gateway does otherwise than S3 is at https://huggingface.co/docs/hub/storage-buckets-s3.
"""

from __future__ import annotations

import configparser
from pathlib import Path

from farflung.base.errors import ConfigError
from farflung.config import environ

MAKE_KEYS = (
    "on https://huggingface.co/settings/tokens, create a token that may write, choose Generate S3 credentials in its "
    "menu, and set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY"
)

_GATEWAY, _REGION = "https://s3.hf.co", "us-east-1"  # its only region
_PROFILE = "hf"


def of_gateway(address: str) -> tuple[str, dict[str, str]]:
    """Return an address at the gateway, and obstore's settings for it; AWS_ENDPOINT_URL puts another in its place.

    Raises:
        ConfigError: it is no such address, or there are no keys.
    """
    namespace, bucket, run = [*address.removeprefix("hf://").split("/", 2), "", ""][:3]
    if not (namespace and bucket and run) or "//" in run or "\\" in run:
        raise ConfigError(
            f"{address} is not hf://NAMESPACE/BUCKET/RUN: a user or organization, its bucket, and a name."
        )
    gateway = environ.text("AWS_ENDPOINT_URL") or _GATEWAY
    settings = {"endpoint": f"{gateway.rstrip('/')}/{namespace}", "region": _REGION}
    settings |= {"virtual_hosted_style_request": "false", **_keys(address)}
    return f"s3://{bucket}/{run}", {f"aws_{name}": value for name, value in settings.items()}


def _keys(address: str) -> dict[str, str]:
    """Return the keys of a profile, if none are in the environment, where obstore finds them."""
    names = "access_key_id", "secret_access_key"
    if all(environ.text(f"AWS_{name.upper()}") for name in names):
        return {}
    name = environ.text("AWS_PROFILE") or _PROFILE
    file = environ.text("AWS_SHARED_CREDENTIALS_FILE") or Path.home() / ".aws" / "credentials"
    profiles = configparser.ConfigParser(interpolation=None)
    try:
        profiles.read(file)
    except configparser.Error as error:
        raise ConfigError(f"{file} can't be read: {error}.") from None
    found = {key: profiles.get(name, f"aws_{key}", fallback="") for key in names}
    if not all(found.values()):
        raise ConfigError(f"There are no keys for {address}, nor a profile [{name}] with them in {file}: {MAKE_KEYS}.")
    return found
