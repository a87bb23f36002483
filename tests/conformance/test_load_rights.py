"""Who may load what, and which files a load may name: a server whose callers have tokens, on both doors."""

from __future__ import annotations

import json

import grpc
import pytest

from inferd_client.pb import grpc_service_pb2 as pb
from tests.conformance import doors
from tests.conformance.client import Stub, floats, request
from tests.conformance.test_repository import CONFIG, MODEL, write

ENSEMBLE = """
platform: "ensemble"
max_batch_size: 8
input {{ name: "INPUT0" data_type: TYPE_FP32 dims: [ -1 ] }}
output {{ name: "OUTPUT0" data_type: TYPE_FP32 dims: [ -1 ] }}
ensemble_scheduling {{
  step {{
    model_name: "{step}" model_version: -1
    input_map {{ key: "INPUT0" value: "INPUT0" }}
    output_map {{ key: "OUTPUT0" value: "OUTPUT0" }}
  }}
}}
"""
TOKENS = """
operator  all overrides
loader    groups=model-repository,inference,health,model-config  models=mine*
author    groups=model-repository,inference  models=mine*  overrides
*         groups=model-repository  models=mine*
"""
CODE = {"backend": "python", "max_batch_size": 8} | {
    put: [{"name": name, "data_type": "TYPE_FP32", "dims": [-1]}]
    for put, name in (("input", "INPUT0"), ("output", "OUTPUT0"))
}


@pytest.fixture(scope="module", params=doors.NAMES)
def served(request, tmp_path_factory):
    root = tmp_path_factory.mktemp("loading")
    for name in ("secret", "mine", "mine_step"):
        write(root, name)
    write(root, "mine_ensemble", ENSEMBLE.format(step="secret"))
    write(root, "mine_missing", ENSEMBLE.format(step="not_there"))
    write(root, "mine_misfit", ENSEMBLE.format(step="secret").replace('key: "INPUT0"', 'key: "INPUT9"'))
    write(root, "mine_around", ENSEMBLE.format(step="mine_misfit"))
    write(root, "mine_own", ENSEMBLE.format(step="mine_step"))
    write(root, "mine_code", model_py=MODEL.format(factor=2))
    (root / "elsewhere.py").write_text(MODEL.format(factor=7))
    (root / "mine_code" / "1" / "link.py").symlink_to(root / "elsewhere.py")
    tokens = tmp_path_factory.mktemp("tokens") / "tokens"
    tokens.write_text(TOKENS)
    tokens.chmod(0o600)
    options = ("--model-control-mode=explicit", f"--grpc-token-file={tokens}")
    with doors.running_server(request.param, root, *options) as process:
        process.root = root
        yield process


class Caller:
    """The calls of somebody with a token; each gives "" or the code and the text of its error."""

    def __init__(self, address, token):
        self._channel = grpc.insecure_channel(address)
        self._metadata = (("authorization", f"Bearer {token}"),) if token else ()
        self.stub = Stub(self._channel)

    def _made(self, call, message):
        try:
            self.answer = call(message, metadata=self._metadata, timeout=60)
        except grpc.RpcError as error:
            return f"{error.code().name}: {error.details()}"
        return ""

    def load(self, name, config=None, **files):
        message = pb.RepositoryModelLoadRequest(model_name=name)
        if config is not None:
            message.parameters["config"].string_param = config if isinstance(config, str) else json.dumps(config)
        for path, text in files.items():
            message.parameters[f"file:1/{path.replace('_py', '.py')}"].bytes_param = text.encode()
        return self._made(self.stub.RepositoryModelLoad, message)

    def unload(self, name, *, dependents=False):
        message = pb.RepositoryModelUnloadRequest(model_name=name)
        message.parameters["unload_dependents"].bool_param = dependents
        return self._made(self.stub.RepositoryModelUnload, message)

    def infer(self, name):
        return self._made(self.stub.ModelInfer, request(name, floats(1)))

    def index(self):
        assert self._made(self.stub.RepositoryIndex, pb.RepositoryIndexRequest()) == ""
        return {entry.name: entry for entry in self.answer.models}


@pytest.fixture
def operator(served):
    caller = Caller(served.address, "operator")
    yield caller
    for name, entry in caller.index().items():
        if entry.state == "READY":
            assert caller.unload(name) == ""


@pytest.fixture
def loader(served):
    return Caller(served.address, "loader")


@pytest.fixture
def author(served):
    return Caller(served.address, "author")


# ---- models= bounds who may load -------------------------------------------------------------------------------------


def test_an_ensemble_is_loaded_by_who_may_load_the_models_of_its_steps(operator, loader):
    denied = loader.load("mine_ensemble")
    assert denied.startswith("PERMISSION_DENIED: the token does not allow the model of a step of ensemble 'mine_ens")
    assert "secret" not in denied
    assert operator.index()["secret"].state != "READY"
    assert loader.load("mine_own") == ""
    assert loader.infer("mine_own") == ""
    assert operator.load("mine_ensemble") == ""
    assert loader.infer("mine_ensemble") == "", "the operator composed it"


def test_what_does_not_exist_looks_like_what_is_not_allowed(operator, loader):
    denied, missing = loader.load("mine_ensemble"), loader.load("mine_missing")
    assert denied.replace("mine_ensemble", "X") == missing.replace("mine_missing", "X")
    assert "failed to poll" not in missing
    assert operator.load("mine_missing").startswith("INVALID_ARGUMENT")


def test_a_model_that_an_operator_unloaded_stays_unloaded(operator, loader):
    assert operator.load("mine_ensemble") == ""
    assert operator.unload("secret") == ""
    assert loader.load("mine_ensemble").startswith("PERMISSION_DENIED")
    assert operator.index()["secret"].state != "READY"


def test_dependents_that_the_caller_may_not_unload_stay(operator, loader):
    assert operator.load("mine_ensemble") == ""
    assert loader.unload("mine_ensemble", dependents=True) == ""
    assert operator.index()["secret"].state == "READY"
    assert operator.load("mine_ensemble") == ""
    assert operator.unload("mine_ensemble", dependents=True) == ""
    assert operator.index()["secret"].state != "READY"


def test_the_index_names_no_model_that_is_not_allowed(operator, loader):
    assert "not_there" in operator.load("mine_missing")
    assert operator.load("secret") == ""
    index = loader.index()
    assert set(index) == {name for name in operator.index() if name.startswith("mine")}
    assert "secret" not in "".join(entry.reason for entry in index.values())


def test_the_index_gives_no_reasons_that_tell_of_models_that_are_not_allowed(operator, loader):
    """Nor of one that is not there: a model that does not fit its ensemble is described, with its tensors."""
    assert "in model secret" in operator.load("mine_misfit")
    assert operator.load("mine_around") != ""
    assert operator.load("mine_missing") != ""
    told = {name: entry.reason for name, entry in operator.index().items()}
    assert "its inputs: INPUT0" in told["mine_misfit"]
    assert "not_there" in told["mine_missing"]
    hidden = {loader.index()[name].reason for name in ("mine_misfit", "mine_around", "mine_missing")}
    assert hidden == {"it depends on a model that the token does not allow"}
    assert operator.load("mine_code", CODE | {"default_model_filename": "absent.py"}) != ""
    assert loader.index()["mine_code"].reason == operator.index()["mine_code"].reason != "", "its own reasons are told"


# ---- overrides are a right of their own ------------------------------------------------------------------------------


@pytest.mark.parametrize("files", [{}, {"model_py": MODEL.format(factor=3)}])
def test_a_load_with_an_override_needs_the_right(operator, loader, author, files):
    del operator  # unloads
    denied = loader.load("mine_code", CODE, **files)
    assert denied.startswith("PERMISSION_DENIED: the token does not allow loads with a configuration or files")
    assert author.load("mine_code", CODE, **files) == ""
    assert author.infer("mine_code") == ""


def test_a_load_with_an_override_by_a_caller_without_a_token(served):
    denied = Caller(served.address, "").load("mine_code", CODE)
    assert denied.startswith("UNAUTHENTICATED: loads with a configuration or files of their own need a token with the")


def test_an_override_makes_no_step_of_a_forbidden_model(operator, author):
    config = {
        "platform": "ensemble",
        "max_batch_size": 8,
        "input": CODE["input"],
        "output": CODE["output"],
        "ensemble_scheduling": {
            "step": [
                {
                    "model_name": "secret",
                    "model_version": -1,
                    "input_map": {"INPUT0": "INPUT0"},
                    "output_map": {"OUTPUT0": "OUTPUT0"},
                }
            ]
        },
    }
    assert author.load("mine_own", config).startswith("PERMISSION_DENIED")
    assert operator.load("mine_own", config) == ""


@pytest.mark.parametrize("transport", doors.NAMES)
def test_without_tokens_overrides_are_off(transport, tmp_path):
    write(tmp_path, "mine_code", model_py=MODEL.format(factor=2))
    with doors.running_server(transport, tmp_path, "--model-control-mode=explicit") as process:
        anybody = Caller(process.address, "")
        denied = anybody.load("mine_code", CODE, model_py=MODEL.format(factor=3))
        assert denied.startswith("PERMISSION_DENIED: ")
        assert "--model-load-overrides" in denied
        assert anybody.load("mine_code") == ""


# ---- paths stay inside -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "name",
    ["../../elsewhere.py", "../../absent.py", "/etc/passwd", "/etc/absent", "link.py", "../1/../../elsewhere.py"],
)
@pytest.mark.parametrize("field", ["default_model_filename", "cc_model_filenames"])
def test_a_model_file_of_an_override_stays_inside(operator, name, field):
    """What is there and what is not is told alike."""
    value = name if field == "default_model_filename" else {"9.0": name}
    refused = operator.load("mine_code", CODE | {field: value})
    assert f"{field} '{name}' must stay within the model directory" in refused
    assert operator.load("mine_code", CODE) == ""


def test_an_environment_of_an_override_stays_inside(operator):
    for path in ("/usr", "../../elsewhere.py", "$$TRITON_MODEL_DIRECTORY/../secret"):
        config = CODE | {"parameters": {"EXECUTION_ENV_PATH": {"string_value": path}}}
        assert "must stay within the model directory" in operator.load("mine_code", config), path


def test_an_accelerator_of_an_override_has_no_path(operator):
    accelerator = {"name": "tensorrt", "parameters": {"trt_engine_cache_path": "/tmp"}}
    config = CODE | {"optimization": {"execution_accelerators": {"gpu_execution_accelerator": [accelerator]}}}
    assert "'trt_engine_cache_path' of accelerator 'tensorrt' is a path" in operator.load("mine_code", config)


def test_a_folder_of_a_version_may_be_a_link_that_the_operator_laid(served, operator):
    """A deployment may share its models among repositories by links."""
    shared = served.root.parent / f"{served.root.name}-shared"
    shared.mkdir()
    (shared / "other.py").write_text(MODEL.format(factor=5))
    (shared / "model.py").write_text(MODEL.format(factor=5))
    write(served.root, "linked", CONFIG.format(backend="python") + 'default_model_filename: "other.py"')
    (served.root / "linked" / "1").rmdir()
    (served.root / "linked" / "1").symlink_to(shared)
    assert operator.load("linked") == ""
    assert operator.load("linked", CODE | {"default_model_filename": "other.py"}) == ""
    assert operator.infer("linked") == ""
