"""Reads a SavedModel without TensorFlow: the tags of its graphs, and the signatures of each."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any

from google.protobuf import descriptor_pb2, descriptor_pool, message_factory
from google.protobuf.message import DecodeError

from inferd.backends.api import BackendError, Signature, TensorSpec

FILE = "saved_model.pb"
INITIALISATION = frozenset({"__saved_model_init_op", "__saved_model_train_op"})
"""Signatures that are not for inference."""

DATATYPES: Mapping[int, str] = MappingProxyType(
    {
        1: "FP32",
        2: "FP64",
        3: "INT32",
        4: "UINT8",
        5: "INT16",
        6: "INT8",
        7: "BYTES",
        9: "INT64",
        10: "BOOL",
        14: "BF16",
        17: "UINT16",
        19: "FP16",
        22: "UINT32",
        23: "UINT64",
    }
)
"""v2 datatype names of tensorflow.DataType."""

_FIELD = descriptor_pb2.FieldDescriptorProto
# The parts of tensorflow/core/protobuf/{saved_model,meta_graph}.proto and tensor_shape.proto of which signatures are
# made: message -> (field, number, type, repeated). The parser skips the rest as unknown.
_MESSAGES: Mapping[str, tuple[tuple[str, int, str, bool], ...]] = MappingProxyType(
    {
        "SavedModel": (("meta_graphs", 2, "MetaGraphDef", True),),
        "MetaGraphDef": (("meta_info_def", 1, "MetaInfoDef", False), ("signature_def", 5, "SignatureEntry", True)),
        "MetaInfoDef": (("tags", 4, "string", True),),
        "SignatureEntry": (("key", 1, "string", False), ("value", 2, "SignatureDef", False)),
        "SignatureDef": (("inputs", 1, "TensorEntry", True), ("outputs", 2, "TensorEntry", True)),
        "TensorEntry": (("key", 1, "string", False), ("value", 2, "TensorInfo", False)),
        "TensorInfo": (("name", 1, "string", False), ("dtype", 2, "int32", False), ("shape", 3, "Shape", False)),
        "Shape": (("dim", 2, "Dim", True), ("unknown_rank", 3, "bool", False)),
        "Dim": (("size", 1, "int64", False),),
    }
)
_SCALARS = {
    "string": _FIELD.TYPE_STRING,
    "int32": _FIELD.TYPE_INT32,
    "int64": _FIELD.TYPE_INT64,
    "bool": _FIELD.TYPE_BOOL,
}


def _saved_model_class() -> Any:
    package = "inferd.saved_model"
    file = descriptor_pb2.FileDescriptorProto(name="inferd/saved_model.proto", package=package, syntax="proto3")
    for name, fields in _MESSAGES.items():
        message = file.message_type.add(name=name)
        for field, number, kind, repeated in fields:
            made = message.field.add(name=field, number=number)
            made.label = _FIELD.LABEL_REPEATED if repeated else _FIELD.LABEL_OPTIONAL
            if kind in _SCALARS:
                made.type = _SCALARS[kind]
            else:
                made.type = _FIELD.TYPE_MESSAGE
                made.type_name = f".{package}.{kind}"
    pool = descriptor_pool.DescriptorPool()
    pool.Add(file)
    return message_factory.GetMessageClass(pool.FindMessageTypeByName(f"{package}.SavedModel"))


_SavedModel = _saved_model_class()


@dataclass(frozen=True, slots=True)
class Tensor:
    """An input or output of a signature.

    Attributes:
        datatype: the v2 name of its datatype; "" if the protocol has none.
        dtype: TensorFlow's number of its datatype.
        shape: -1 for a dimension that varies; None if not even the number of dimensions is known.
    """

    name: str
    datatype: str
    dtype: int
    shape: tuple[int, ...] | None


@dataclass(frozen=True, slots=True)
class SavedSignature:
    """One way in which a graph can be called."""

    name: str
    inputs: tuple[Tensor, ...]
    outputs: tuple[Tensor, ...]


def read_signature(folder: Path, model: str, tag: str, name: str) -> SavedSignature:
    """A signature of the graph with this tag.

    Args:
        folder: the SavedModel.
        model: the model's name, for errors.
        tag: the tag of the graph.
        name: the signature's name; "": `serving_default`, or else the only signature.

    Raises:
        BackendError: the folder holds no SavedModel, or it has no such graph or signature; the text lists those that
            exist.
    """
    path = folder / FILE
    saved = _SavedModel()
    try:
        saved.ParseFromString(path.read_bytes())
    except FileNotFoundError:
        raise BackendError(f"unable to find '{path}' for model '{model}': '{folder}' is no SavedModel") from None
    except (OSError, DecodeError) as error:
        raise BackendError(f"failed to load '{model}' from '{path}': {error}") from error
    graphs = [graph for graph in saved.meta_graphs if tag in graph.meta_info_def.tags]
    if not graphs:
        tags = "; ".join(",".join(graph.meta_info_def.tags) for graph in saved.meta_graphs) or "none"
        raise BackendError(
            f"model '{model}': the SavedModel has no graph with tag '{tag}' (those of its graphs are {tags}): the "
            "parameter TF_GRAPH_TAG names another"
        )
    found = {entry.key: entry.value for entry in graphs[0].signature_def if entry.key not in INITIALISATION}
    wanted = name or "serving_default"
    if not name and wanted not in found and len(found) == 1:
        (wanted,) = found
    if wanted not in found:
        raise BackendError(
            f"model '{model}': the SavedModel has no signature '{wanted}' (it has {', '.join(found) or 'none'}): the "
            "parameter TF_SIGNATURE_DEF names another"
        )
    signature = found[wanted]
    return SavedSignature(wanted, _tensors(signature.inputs), _tensors(signature.outputs))


def _tensors(entries: Any) -> tuple[Tensor, ...]:
    made = []
    for entry in sorted(entries, key=lambda each: each.key):
        shape = entry.value.shape
        unknown = shape.unknown_rank or not entry.value.HasField("shape")
        dims = None if unknown else tuple(dim.size if dim.size >= 0 else -1 for dim in shape.dim)
        made.append(Tensor(entry.key, DATATYPES.get(entry.value.dtype, ""), entry.value.dtype, dims))
    return tuple(made)


def describe(model: str, signature: SavedSignature) -> Signature:
    """The signature that completes a configuration. A model batches if the first dimension of all its tensors varies.

    Raises:
        BackendError: a tensor has a datatype or a rank that cannot be served.
    """
    tensors = (*signature.inputs, *signature.outputs)
    batches = all(tensor.shape and tensor.shape[0] == -1 for tensor in tensors)
    return Signature(
        inputs=tuple(_described(model, tensor, batches) for tensor in signature.inputs),
        outputs=tuple(_described(model, tensor, batches) for tensor in signature.outputs),
        batches=batches,
    )


def _described(model: str, tensor: Tensor, batches: bool) -> TensorSpec:
    if not tensor.datatype:
        raise BackendError(f"model '{model}': unsupported datatype {tensor.dtype} of '{tensor.name}'")
    if tensor.shape is None:
        raise BackendError(
            f"model '{model}': the file does not say how many dimensions '{tensor.name}' has: configure it"
        )
    return TensorSpec(tensor.name, tensor.datatype, tensor.shape[1:] if batches else tensor.shape or (1,))
