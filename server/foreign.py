"""Options of tritonserver that this server does not have: which values change nothing, and why the others are refused.

Scripts written for tritonserver should start here unchanged where that is honest. An option that asks for something
that is not there must say so rather than be swallowed.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from types import MappingProxyType


@dataclass(frozen=True, slots=True)
class Refused:
    """Accepted silently with a harmless value, refused with the reason otherwise."""

    reason: str
    harmless: tuple[str, ...] = ()
    is_flag: bool = False  # may stand without a value, meaning true


@dataclass(frozen=True, slots=True)
class Ignored:
    """Accepted whatever its value; one line says why it does nothing."""

    reason: str
    silent: tuple[str, ...] = ()  # values about which nothing is said
    is_flag: bool = False


def _ignored(reason: str, names: Iterable[str]) -> dict[str, Refused | Ignored]:
    return {name: Ignored(reason) for name in names}


def _refused(reason: str, names: Iterable[str], *harmless: str) -> dict[str, Refused | Ignored]:
    return {name: Refused(reason, harmless) for name in names}


def _off(reason: str, names: Iterable[str]) -> dict[str, Refused | Ignored]:
    """Flags that may only be false."""
    return {name: Refused(reason, ("false",), is_flag=True) for name in names}


_GRPC_ONLY = "inferd serves gRPC only"
_OWN_THREADS = "inferd has no such threads or pools to size"
_NO_METRICS = "metrics are not served yet"
_NO_TRACE = "tracing is not served yet"
_NO_CACHE = "caches are built in: --cache-config tells which"

FOREIGN: Mapping[str, Refused | Ignored] = MappingProxyType(
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
        "strict-model-config": Refused(
            "it is deprecated in tritonserver too: write --disable-auto-complete-config", ("false",), is_flag=True
        ),
        **_refused("loading again after a failure is not served yet", ["model-load-retry-count"], "0"),
        **_off("namespaces of models are not served yet", ["model-namespacing"]),
        **_refused("repository agents are not served yet", ["repoagent-directory"]),
        "cache-directory": Ignored(_NO_CACHE),
        "response-cache-byte-size": Refused("write --cache-config local,size=BYTES", ("0",)),
        # -- GPUs --
        **_refused("how much of a GPU models may take is not limited yet", ["model-load-gpu-limit"]),
        "enable-peer-access": Ignored("instances do not copy between GPUs", silent=("false",), is_flag=True),
        "cuda-virtual-address-size": Ignored("states of sequences do not lie on GPUs"),
        "min-supported-compute-capability": Ignored("every GPU that the driver shows is used"),
        # -- metrics, tracing, logging --
        **_off(_NO_METRICS, ("allow-metrics", "allow-gpu-metrics", "allow-cpu-metrics")),
        **_refused(_NO_METRICS, ("metrics-address", "metrics-port", "metrics-interval-ms", "metrics-config")),
        **_refused(_NO_TRACE, ["trace-config"], "level=off"),
        **_refused(_NO_TRACE, ("trace-file", "trace-level", "trace-rate", "trace-count", "trace-log-frequency")),
        **_refused("logging to a file is not served yet: redirect standard error", ["log-file"]),
    }
)
