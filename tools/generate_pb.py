"""Generate *_pb2.py and .pyi of inferd_client/pb/ from proto/: messages only, no service stubs.

    python tools/generate_pb.py [DIRECTORY]        DIRECTORY: write below it instead of the source tree

Three things in protoc's output are changed: imports among the files and the messages' `__module__` become those of the
package, and descriptors go to the package's own pool (see inferd_client/pb/__init__.py). The client has the messages,
and the server uses them, because the client is also installed without the server.
"""

import re
import sys
from importlib.resources import files
from pathlib import Path

from grpc_tools import protoc

ROOT = Path(__file__).resolve().parent.parent
PACKAGE = "inferd_client.pb"
SOURCES = ("model_config.proto", "grpc_service.proto", "load_report.proto")

DEFAULT_POOL = "_descriptor_pool.Default()"
POOL_IMPORT = "from google.protobuf import descriptor_pool as _descriptor_pool\n"
SIBLING = re.compile(r"^import (\w+_pb2) as", re.MULTILINE)


def replaced(text: str, old: str, new: str) -> str:
    """`text` with `old` replaced. A `text` without `old` is an error: protoc's output has changed."""
    if old not in text:
        raise SystemExit(f"protoc's output lacks {old!r}: adapt tools/generate_pb.py to this grpcio-tools")
    return text.replace(old, new)


def adapted_stub(text: str) -> str:
    return SIBLING.sub(rf"from {PACKAGE} import \1 as", text)


def adapted_module(text: str, module: str) -> str:
    text = adapted_stub(text)
    text = replaced(text, DEFAULT_POOL, "_pool")
    text = replaced(text, POOL_IMPORT, f"from {PACKAGE} import pool as _pool\n")
    return replaced(text, f"DESCRIPTOR, '{module}'", f"DESCRIPTOR, '{PACKAGE}.{module}'")


def generate(root: Path) -> None:
    """Write the modules and stubs of the package, whose folder is below `root`."""
    well_known = files("grpc_tools") / "_proto"
    directory = root / PACKAGE.replace(".", "/")
    arguments = [
        "protoc",
        f"-I{ROOT / 'proto'}",
        f"-I{well_known}",
        f"--python_out={directory}",
        f"--pyi_out={directory}",
        *SOURCES,
    ]
    directory.mkdir(parents=True, exist_ok=True)
    if protoc.main(arguments) != 0:
        raise SystemExit("protoc failed")
    for source in SOURCES:
        module = f"{Path(source).stem}_pb2"
        code, stub = directory / f"{module}.py", directory / f"{module}.pyi"
        code.write_text(adapted_module(code.read_text(), module))
        stub.write_text(adapted_stub(stub.read_text()))


if __name__ == "__main__":
    generate(Path(sys.argv[1]) if len(sys.argv) > 1 else ROOT)
