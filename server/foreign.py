"""Options of tritonserver that this server does not have: each is replaced, ignored or refused, with the reason.

Scripts for tritonserver should start here unchanged, unless that would mislead: an option for a missing feature must be
refused, not ignored.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import TypeAlias


@dataclass(frozen=True, slots=True)
class Refused:
    """An option that is accepted silently with a harmless value, and refused with the reason otherwise."""

    reason: str
    harmless: tuple[str, ...] = ()
    is_flag: bool = False  # a missing value means true


@dataclass(frozen=True, slots=True)
class Ignored:
    """An option that is accepted with any value; one line says why it has no effect."""

    reason: str
    silent: tuple[str, ...] = ()  # values without a message
    is_flag: bool = False


@dataclass(frozen=True, slots=True)
class Replaced:
    """An option that is replaced by one of this server; one line says so."""

    option: str
    value: str  # of that option, with {} for the value given
    silent: tuple[str, ...] = ()  # values without effect and message
    is_flag: bool = False


Foreign: TypeAlias = Refused | Ignored | Replaced


def _ignored(reason: str, names: Iterable[str]) -> dict[str, Foreign]:
    return {name: Ignored(reason) for name in names}


def _refused(reason: str, names: Iterable[str], *harmless: str) -> dict[str, Foreign]:
    return {name: Refused(reason, harmless) for name in names}


def _off(reason: str, names: Iterable[str]) -> dict[str, Foreign]:
    """Flags that are refused unless they are false."""
    return {name: Refused(reason, ("false",), is_flag=True) for name in names}


_GRPC_ONLY = "inferd serves gRPC only"
_OWN_THREADS = "inferd has no such threads or pools to size"
_NO_CACHE = "caches are built in: --cache-config tells which"

FOREIGN: Mapping[str, Foreign] = MappingProxyType(
    {
        # -- other front ends --
        "allow-http": Ignored(_GRPC_ONLY, silent=("false",), is_flag=True),
        "allow-sagemaker": Ignored(_GRPC_ONLY, silent=("false",), is_flag=True),
        "allow-vertex-ai": Ignored(_GRPC_ONLY, silent=("false",), is_flag=True),
        "reuse-http-port": Ignored(_GRPC_ONLY, silent=("false",), is_flag=True),
        **_ignored(
            _GRPC_ONLY,
            (
                "http-address",
                "http-port",
                "http-header-forward-pattern",
                "http-max-input-size",
                "http-restricted-api",
                "http-thread-count",
                "sagemaker-port",
                "sagemaker-safe-port-range",
                "sagemaker-thread-count",
                "vertex-ai-port",
                "vertex-ai-thread-count",
                "vertex-ai-default-model",
            ),
        ),
        # -- gRPC --
        "allow-grpc": Refused("gRPC is all that inferd serves", ("true",), is_flag=True),
        **_ignored(
            _OWN_THREADS,
            (
                "grpc-infer-thread-count",
                "grpc-infer-allocation-pool-size",
                "grpc-max-response-pool-size",
                "buffer-manager-thread-count",
            ),
        ),
        # -- models --
        "strict-model-config": Replaced("disable-auto-complete-config", "{}", ("false",), is_flag=True),
        "model-namespacing": Ignored(
            "requests cannot name a namespace, so all models share one space of names: models of the same "
            "name in two repositories are not served, all others are",
            silent=("false",),
            is_flag=True,
        ),
        "repoagent-directory": Ignored(
            "agents are no libraries here: checksum is built in, and a model that names another is refused"
        ),
        "cache-directory": Ignored(_NO_CACHE),
        "response-cache-byte-size": Replaced("cache-config", "local,size={}", ("0",)),
        # -- GPUs --
        "enable-peer-access": Ignored("instances do not copy between GPUs", silent=("false",), is_flag=True),
        "cuda-virtual-address-size": Ignored("states of sequences do not lie on GPUs"),
        "min-supported-compute-capability": Ignored("every GPU that the driver shows is used"),
        # -- tracing, logging --
        **_refused(
            "it is deprecated in tritonserver too: write --trace-config",
            ("trace-file", "trace-level", "trace-rate", "trace-count", "trace-log-frequency"),
        ),
    }
)
