"""Makes the engine from the settings."""

from __future__ import annotations

import logging

from inferd.backends.api import BackendError
from inferd.backends.loader import BUILTIN, BackendLoader
from inferd.server.engine.config import Options
from inferd.server.engine.engine import Engine
from inferd.server.engine.instances.gpu import GpuPolicy, Gpus
from inferd.server.engine.instances.hosts import HostPolicyError, parse_host_policies
from inferd.server.engine.instances.instances import Hardware
from inferd.server.engine.instances.resources import ResourceError, Resources, parse_limits
from inferd.server.engine.instances.shared_memory import MOST_COPIED, SharedMemoryPolicy
from inferd.server.engine.loading.control import ControlMode, ModelControl
from inferd.server.engine.pbtxt.variables import Variables
from inferd.server.engine.repository.sources import open_sources
from inferd.server.errors import ConfigError, ServerError, StartError
from inferd.server.settings import Settings

log = logging.getLogger("inferd")


def make_loader(settings: Settings) -> BackendLoader:
    """The loader that finds backends."""
    loader = BackendLoader(settings.backend_settings, settings.backend_directory)
    for name in loader.unknown():
        log.warning("--backend-config=%s,...: there is no backend of this name, there are %s", name, ", ".join(BUILTIN))
    return loader


def model_options(settings: Settings, gpus: Gpus) -> Options:
    """The options by which the engine reads configurations."""
    return Options(
        auto_complete=not settings.disable_auto_complete_config,
        config_name=settings.model_config_name,
        default_max_batch_size=settings.default_max_batch_size,
        gpus=gpus.count,
        variables=Variables(settings.config_variable),
    )


def make_engine(settings: Settings, loader: BackendLoader | None = None) -> Engine:
    """The engine, without any model loaded.

    Args:
        settings: of the server.
        loader: finds the backends; by default the one of the settings.

    Raises:
        StartError: the settings do not fit this machine.
    """
    gpus = Gpus(
        GpuPolicy(
            settings.cuda_driver,
            settings.pinned_memory_pool_byte_size,
            settings.cuda_pools,
            settings.gpu_load_limits,
        )
    )
    try:
        sources = open_sources(settings.model_repository, settings.model_name)
    except ServerError as error:
        raise StartError(str(error)) from error
    loader = loader or make_loader(settings)
    try:
        loader.preload()
    except BackendError as error:
        raise StartError(str(error)) from error
    try:
        return Engine(
            sources,
            loader,
            model_options(settings, gpus),
            load_threads=settings.model_load_thread_count,
            load_retries=settings.model_load_retry_count,
            strict_readiness=settings.strict_readiness,
            max_inflight=settings.max_inflight_requests or None,
            max_queued=settings.max_queued_requests_per_model,
            shared_memory=SharedMemoryPolicy(
                shared=settings.allow_client_shm,
                access=settings.client_shm_access,
                prefixes=settings.client_shm_prefix,
                max_regions=settings.client_shm_max_regions,
                max_byte_size=settings.client_shm_max_byte_size,
                user_regions=settings.client_shm_max_regions_per_user or None,
                user_byte_size=settings.client_shm_max_byte_size_per_user or None,
                max_copied=settings.grpc_max_message_size or MOST_COPIED,
            ),
            cache=settings.cache,
            hardware=_hardware(settings, gpus),
            control=ModelControl(
                ControlMode(settings.model_control_mode),
                settings.load_model,
                settings.repository_poll_secs,
                settings.model_memory_budget or None,
            ),
        )
    except ConfigError as error:
        raise StartError(f"cache-config: {error}") from error


def _hardware(settings: Settings, gpus: Gpus) -> Hardware:
    try:
        limits = parse_limits(settings.rate_limit_resource)
        hosts = parse_host_policies(settings.host_policy)
    except ResourceError as error:
        raise StartError(f"rate-limit-resource: {error}") from error
    except HostPolicyError as error:
        raise StartError(f"host-policy: {error}") from error
    return Hardware(hosts, Resources(limits) if settings.rate_limit == "execution_count" else None, gpus)
