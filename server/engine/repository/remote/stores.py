"""Object stores by URL: the store, the path in it, and the credentials, all as in Triton.

    s3://bucket/path    s3://host:port/bucket/path    s3://https://host:port/bucket/path
    gs://bucket/path    as://account/container/path   as://account.blob.core.windows.net/container/path

Credentials come from the environment, under the names that the clouds' own tools use, or from the file that
TRITON_CLOUD_CREDENTIAL_PATH names: there the entry with the longest common prefix with the URL counts.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any

from inferd.backends.installing import pip_install
from inferd.server.errors import ConfigError

if TYPE_CHECKING:
    from obstore.store import ObjectStore

SCHEMES = ("s3://", "gs://", "as://")
CREDENTIALS = "TRITON_CLOUD_CREDENTIAL_PATH"
MOUNTS = {"s3": "TRITON_AWS_MOUNT_DIRECTORY", "gs": "TRITON_GCS_MOUNT_DIRECTORY", "as": "TRITON_AZURE_MOUNT_DIRECTORY"}
"""Environment variables with the folder for copies of a repository."""

_AZURE_SUFFIX = ".blob.core.windows.net"
_CLIENT = {"connect_timeout": "10s", "read_timeout": "30s", "timeout": "24h"}
"""A transfer has no time limit as long as data arrive."""
_RETRY: dict[str, Any] = {"max_retries": 6, "retry_timeout": timedelta(seconds=60)}
"""Retries if the store throttles, or cannot be reached for a while."""


@dataclass(frozen=True, slots=True)
class StoreAddress:
    """The parts of a repository's URL.

    Attributes:
        scheme: s3, gs or as.
        bucket: or container.
        prefix: of the repository in it, without slashes at its ends.
        endpoint: http(s)://host:port of a self-hosted store; empty: the cloud's.
        account: of Azure.
    """

    scheme: str
    bucket: str
    prefix: str
    endpoint: str = ""
    account: str = ""


def parse_url(url: str) -> StoreAddress:
    """The address of a repository.

    Raises:
        ConfigError: the URL has another form.
    """
    scheme, _, rest = url.partition("://")
    endpoint = account = ""
    if scheme == "s3" and (found := re.match(r"(?:(https?)://)?([^/:]+:\d+|(?<=://)[^/]+)(?:/|$)", rest)):
        endpoint = f"{found[1] or 'http'}://{found[2]}"
        rest = rest[found.end() :]
    elif scheme == "as":
        account, _, rest = rest.partition("/")
        account = account.removesuffix(_AZURE_SUFFIX)
    bucket, _, prefix = rest.partition("/")
    if not bucket or f"{scheme}://" not in SCHEMES or (scheme == "as" and not account):
        forms = "s3://[host:port/]bucket/path, gs://bucket/path or as://account/container/path"
        raise ConfigError(f"model-repository: expected {forms}, got {url}")
    return StoreAddress(scheme, bucket, prefix.strip("/"), endpoint, account)


def open_store(url: str, environment: Mapping[str, str] = os.environ) -> ObjectStore:
    """The bucket or container of a URL, not contacted yet.

    Raises:
        ConfigError: obstore is not installed, or the credentials cannot be read.
    """
    try:
        from obstore import store as stores
    except ImportError:
        raise ConfigError(f"{url}: repositories in clouds need obstore: {pip_install('inferd[cloud]')}") from None
    address = parse_url(url)
    credential = _credential(url, address.scheme, environment)
    plain = address.endpoint.startswith("http://")
    options: dict[str, Any] = {"client_options": {**_CLIENT, "allow_http": plain}, "retry_config": _RETRY}
    try:
        match address.scheme:
            case "s3":
                return stores.S3Store(address.bucket, config=_s3(address, credential, environment), **options)
            case "gs":
                config = _gcs(credential, environment)
                options["client_options"]["allow_http"] = config.get("base_url", "").startswith("http://")
                return stores.GCSStore(address.bucket, config=config, **options)
            case _:
                config = _azure(address, credential, environment)
                options["client_options"]["allow_http"] = config.get("endpoint", "").startswith("http://")
                return stores.AzureStore(address.bucket, config=config, **options)
    except Exception as error:
        raise ConfigError(f"{url}: {explained(error)}") from None


def _s3(address: StoreAddress, credential: Mapping[str, str], environment: Mapping[str, str]) -> Any:
    config = {"endpoint": address.endpoint} if address.endpoint else {}
    names = {
        "access_key_id": ("key_id", "AWS_ACCESS_KEY_ID"),
        "secret_access_key": ("secret_key", "AWS_SECRET_ACCESS_KEY"),
        "session_token": ("session_token", "AWS_SESSION_TOKEN"),
        "region": ("region", "AWS_DEFAULT_REGION"),
    }
    _choose(config, names, credential, environment)
    if credential and not config.get("access_key_id"):
        raise ConfigError("an entry of s3 has key_id, secret_key and perhaps region and session_token, no profile")
    return config


def _gcs(credential: str | Mapping[str, str], environment: Mapping[str, str]) -> Any:
    config: dict[str, Any] = {}
    if emulator := environment.get("STORAGE_EMULATOR_HOST"):
        base = emulator if "://" in emulator else f"http://{emulator}"
        nobody = {"client_email": "", "private_key": "", "private_key_id": ""}
        key = json.dumps({"gcs_base_url": base, "disable_oauth": True, **nobody})
        return {"base_url": base, "service_account_key": key}
    path = credential if isinstance(credential, str) else environment.get("GOOGLE_APPLICATION_CREDENTIALS", "")
    if path:
        config["application_credentials"] = path
    return config


def _azure(address: StoreAddress, credential: Mapping[str, str], environment: Mapping[str, str]) -> Any:
    config: dict[str, Any] = {"account_name": address.account}
    names = {"account_key": ("account_key", "AZURE_STORAGE_KEY")}
    _choose(config, names, credential, environment)
    if endpoint := environment.get("AZURE_STORAGE_ENDPOINT"):
        config["endpoint"] = endpoint
    return config


def _choose(
    config: dict[str, Any],
    names: Mapping[str, tuple[str, str]],
    credential: Mapping[str, str],
    environment: Mapping[str, str],
) -> None:
    """Values of the credential file's entry, else of the environment; obstore itself looks for others."""
    for key, (named, variable) in names.items():
        if value := credential.get(named, "") if credential else environment.get(variable, ""):
            config[key] = value


def _credential(url: str, scheme: str, environment: Mapping[str, str]) -> Any:
    """The entry of the credential file for this URL; empty without a file."""
    path = environment.get(CREDENTIALS)
    if not path:
        return {}
    try:
        found = json.loads(Path(path).read_text())
        entries = found.get(scheme, {})
        match = max((begin for begin in entries if url.startswith(begin)), key=len, default=None)
        entry = entries[match] if match is not None else {}
        if not isinstance(entry, (str, dict) if scheme == "gs" else dict):
            raise TypeError
        return entry
    except (OSError, ValueError, AttributeError, TypeError) as error:
        why = (error.strerror or "").lower() if isinstance(error, OSError) else "it is not JSON as Triton documents it"
        raise ConfigError(f"{CREDENTIALS}: {path}: {why}") from None


_METADATA = re.compile(
    r"^Generic (?P<cloud>\w+) error: .*Error performing \w+ \S*"
    r"(?:/latest/(?:api/token|meta-data/)|/computeMetadata/|//169\.254\.|[?&]resource=)",
    re.DOTALL,
)
"""Matches an error before any request to the store: the metadata service, the last source of credentials, had none."""
_GIVEN = {
    "S3": "AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY",
    "GCS": "GOOGLE_APPLICATION_CREDENTIALS",
    "MicrosoftAzure": "AZURE_STORAGE_KEY",
}
_CODE = re.compile(r"<Code>([^<]{1,100})</Code>")
_STATUS = re.compile(r"status code: (\d+ [\w ]+)")
_HINTS = {
    "401": "the credentials are not accepted",
    "403": "the credentials may not read it",
    "404": "there is no such bucket or object",
    "412": "it has changed meanwhile",
    "429": "the store is throttling",
    "503": "the store is throttling, or out of service",
}


def explained(error: BaseException) -> str:
    """An error of a store in one line: its answer and the meaning, without internals."""
    text = str(error).partition("\n\nDebug source")[0]
    status, code = _STATUS.search(text), _CODE.search(text)
    if asked := _METADATA.match(text):
        answer = f"answers HTTP {status[1].strip()}" if status else "does not answer"
        return (
            f"no credentials were found: set {_GIVEN.get(asked['cloud'], 'those of the cloud')}, or {CREDENTIALS}; "
            f"this machine has none of its own, its metadata service {answer}"
        )
    if status is None:
        return text.splitlines()[0] if text else type(error).__name__
    return ", ".join(filter(None, (_HINTS.get(status[1][:3]), f"HTTP {status[1].strip()}", code[1] if code else "")))
