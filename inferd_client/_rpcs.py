"""The RPCs other than inference, for both clients: their requests, and the values for callers.

A method returns what `_ask` returns: the response in the synchronous client, a coroutine in the asynchronous one.
"""

from __future__ import annotations

import base64
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from inferd_client._results import message_as_json
from inferd_client.utils import raise_error

if TYPE_CHECKING:
    from inferd_client.grpc._plugins import InferenceServerClientPlugin

Metadata = Mapping[str, Any] | None
Then = Callable[[Any], Any]


def _pb() -> Any:
    from inferd_client.pb import grpc_service_pb2

    return grpc_service_pb2


def _version(model_version: str) -> str:
    if type(model_version) is not str:
        raise_error("model version must be a string")
    return model_version


def _message(as_json: bool) -> Then:
    return message_as_json if as_json else _itself


def _itself(response: Any) -> Any:
    return response


def _nothing(_: Any) -> None:
    return None


class Rpcs:
    """Requests of both clients.

    In all methods `headers` are further headers of the request, and `client_timeout` is the number of seconds that the
    call may take. A method that gets no response raises InferenceServerException with the reason.
    """

    _plugin: InferenceServerClientPlugin | None = None

    def _ask(self, method: str, request: Any, then: Then, headers: Metadata, timeout: float | None) -> Any:
        raise NotImplementedError

    # ---- plugins ----------------------------------------------------------------------------------------------------

    def register_plugin(self, plugin: InferenceServerClientPlugin) -> None:
        """Register a plugin, which sees the headers of each request."""
        if self._plugin is not None:
            raise_error(
                "A plugin is already registered. Please unregister the previous plugin first before registering a new"
                " plugin."
            )
        self._plugin = plugin

    def plugin(self) -> InferenceServerClientPlugin | None:
        """The registered plugin."""
        return self._plugin

    def unregister_plugin(self) -> None:
        """Remove the plugin."""
        if self._plugin is None:
            raise_error("No plugin has been registered.")
        self._plugin = None

    def _metadata(self, headers: Metadata) -> Metadata:
        if self._plugin is None:
            return headers
        from inferd_client.grpc._plugins import Request

        request = Request(headers)
        self._plugin(request)
        return request.headers

    # ---- the server and its models ----------------------------------------------------------------------------------

    def is_server_live(self, headers: Metadata = None, client_timeout: float | None = None) -> Any:
        """Whether the server is live."""
        return self._ask(
            "ServerLive", _pb().ServerLiveRequest(), lambda response: response.live, headers, client_timeout
        )

    def is_server_ready(self, headers: Metadata = None, client_timeout: float | None = None) -> Any:
        """Whether the server is ready."""
        request = _pb().ServerReadyRequest()
        return self._ask("ServerReady", request, lambda response: response.ready, headers, client_timeout)

    def is_model_ready(
        self, model_name: str, model_version: str = "", headers: Metadata = None, client_timeout: float | None = None
    ) -> Any:
        """Whether a model is ready."""
        request = _pb().ModelReadyRequest(name=model_name, version=_version(model_version))
        return self._ask("ModelReady", request, lambda response: response.ready, headers, client_timeout)

    def get_server_metadata(
        self, headers: Metadata = None, as_json: bool = False, client_timeout: float | None = None
    ) -> Any:
        """The server's ServerMetadataResponse, or its JSON."""
        return self._ask("ServerMetadata", _pb().ServerMetadataRequest(), _message(as_json), headers, client_timeout)

    def get_model_metadata(
        self,
        model_name: str,
        model_version: str = "",
        headers: Metadata = None,
        as_json: bool = False,
        client_timeout: float | None = None,
    ) -> Any:
        """A model's ModelMetadataResponse, or its JSON."""
        request = _pb().ModelMetadataRequest(name=model_name, version=_version(model_version))
        return self._ask("ModelMetadata", request, _message(as_json), headers, client_timeout)

    def get_model_config(
        self,
        model_name: str,
        model_version: str = "",
        headers: Metadata = None,
        as_json: bool = False,
        client_timeout: float | None = None,
    ) -> Any:
        """A model's ModelConfigResponse, or its JSON."""
        request = _pb().ModelConfigRequest(name=model_name, version=_version(model_version))
        return self._ask("ModelConfig", request, _message(as_json), headers, client_timeout)

    def get_model_repository_index(
        self, headers: Metadata = None, as_json: bool = False, client_timeout: float | None = None
    ) -> Any:
        """The RepositoryIndexResponse, or its JSON."""
        return self._ask("RepositoryIndex", _pb().RepositoryIndexRequest(), _message(as_json), headers, client_timeout)

    def load_model(
        self,
        model_name: str,
        headers: Metadata = None,
        config: str | None = None,
        files: Mapping[str, bytes] | None = None,
        client_timeout: float | None = None,
    ) -> Any:
        """Load or reload a model.

        Args:
            config: in place of its config.pbtxt, in JSON.
            files: contents of its files, by "file:" and their paths; needs `config`.
        """
        request = _pb().RepositoryModelLoadRequest(model_name=model_name)
        if config is not None:
            request.parameters["config"].string_param = config
        for path, content in (files or {}).items():
            request.parameters[path].bytes_param = content
        return self._ask("RepositoryModelLoad", request, _nothing, headers, client_timeout)

    def unload_model(
        self,
        model_name: str,
        headers: Metadata = None,
        unload_dependents: bool = False,
        client_timeout: float | None = None,
    ) -> Any:
        """Unload a model and, with `unload_dependents`, the models that its load has loaded."""
        request = _pb().RepositoryModelUnloadRequest(model_name=model_name)
        request.parameters["unload_dependents"].bool_param = unload_dependents
        return self._ask("RepositoryModelUnload", request, _nothing, headers, client_timeout)

    def get_inference_statistics(
        self,
        model_name: str = "",
        model_version: str = "",
        headers: Metadata = None,
        as_json: bool = False,
        client_timeout: float | None = None,
    ) -> Any:
        """The ModelStatisticsResponse of a model, or of all, or its JSON."""
        request = _pb().ModelStatisticsRequest(name=model_name, version=_version(model_version))
        return self._ask("ModelStatistics", request, _message(as_json), headers, client_timeout)

    # ---- settings ---------------------------------------------------------------------------------------------------

    def update_trace_settings(
        self,
        model_name: str | None = None,
        settings: Mapping[str, Any] | None = None,
        headers: Metadata = None,
        as_json: bool = False,
        client_timeout: float | None = None,
    ) -> Any:
        """Change how requests are traced, of a model or of all; a value None takes a setting back.

        Returns the TraceSettingResponse, or its JSON.
        """
        request = _pb().TraceSettingRequest()
        if model_name:
            request.model_name = model_name
        for key, value in (settings or {}).items():
            place = request.settings[key]
            if value is not None:
                place.value.extend(value if isinstance(value, list) else [value])
        return self._ask("TraceSetting", request, _message(as_json), headers, client_timeout)

    def get_trace_settings(
        self,
        model_name: str | None = None,
        headers: Metadata = None,
        as_json: bool = False,
        client_timeout: float | None = None,
    ) -> Any:
        """How requests are traced: the TraceSettingResponse, or its JSON."""
        return self.update_trace_settings(model_name, None, headers, as_json, client_timeout)

    def update_log_settings(
        self,
        settings: Mapping[str, Any],
        headers: Metadata = None,
        as_json: bool = False,
        client_timeout: float | None = None,
    ) -> Any:
        """Change what is logged. Returns the LogSettingsResponse, or its JSON."""
        request = _pb().LogSettingsRequest()
        for key, value in settings.items():
            place = request.settings[key]
            if value is None:
                continue
            if key in ("log_file", "log_format"):
                place.string_param = value
            elif key == "log_verbose_level":
                place.uint32_param = value
            else:
                place.bool_param = value
        return self._ask("LogSettings", request, _message(as_json), headers, client_timeout)

    def get_log_settings(
        self, headers: Metadata = None, as_json: bool = False, client_timeout: float | None = None
    ) -> Any:
        """What is logged: the LogSettingsResponse, or its JSON."""
        return self.update_log_settings({}, headers, as_json, client_timeout)

    # ---- shared memory ----------------------------------------------------------------------------------------------

    def get_system_shared_memory_status(
        self,
        region_name: str = "",
        headers: Metadata = None,
        as_json: bool = False,
        client_timeout: float | None = None,
    ) -> Any:
        """The regions, or one: the SystemSharedMemoryStatusResponse, or its JSON."""
        request = _pb().SystemSharedMemoryStatusRequest(name=region_name)
        return self._ask("SystemSharedMemoryStatus", request, _message(as_json), headers, client_timeout)

    def register_system_shared_memory(
        self,
        name: str,
        key: str,
        byte_size: int,
        offset: int = 0,
        headers: Metadata = None,
        client_timeout: float | None = None,
    ) -> Any:
        """Register a region: a range of a shared memory object."""
        request = _pb().SystemSharedMemoryRegisterRequest(name=name, key=key, offset=offset, byte_size=byte_size)
        return self._ask("SystemSharedMemoryRegister", request, _nothing, headers, client_timeout)

    def unregister_system_shared_memory(
        self, name: str = "", headers: Metadata = None, client_timeout: float | None = None
    ) -> Any:
        """Unregister a region, or all."""
        request = _pb().SystemSharedMemoryUnregisterRequest(name=name)
        return self._ask("SystemSharedMemoryUnregister", request, _nothing, headers, client_timeout)

    def get_cuda_shared_memory_status(
        self,
        region_name: str = "",
        headers: Metadata = None,
        as_json: bool = False,
        client_timeout: float | None = None,
    ) -> Any:
        """The regions, or one: the CudaSharedMemoryStatusResponse, or its JSON."""
        request = _pb().CudaSharedMemoryStatusRequest(name=region_name)
        return self._ask("CudaSharedMemoryStatus", request, _message(as_json), headers, client_timeout)

    def register_cuda_shared_memory(
        self,
        name: str,
        raw_handle: bytes,
        device_id: int,
        byte_size: int,
        headers: Metadata = None,
        client_timeout: float | None = None,
    ) -> Any:
        """Register a region: the first bytes of a device's memory, by its IPC handle in Base64."""
        request = _pb().CudaSharedMemoryRegisterRequest(
            name=name, raw_handle=base64.b64decode(raw_handle), device_id=device_id, byte_size=byte_size
        )
        return self._ask("CudaSharedMemoryRegister", request, _nothing, headers, client_timeout)

    def unregister_cuda_shared_memory(
        self, name: str = "", headers: Metadata = None, client_timeout: float | None = None
    ) -> Any:
        """Unregister a region, or all."""
        request = _pb().CudaSharedMemoryUnregisterRequest(name=name)
        return self._ask("CudaSharedMemoryUnregister", request, _nothing, headers, client_timeout)
