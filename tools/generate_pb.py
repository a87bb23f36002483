"""Generate server/pb/*_pb2.py and .pyi from proto/: messages only, no service stubs.

    python tools/generate_pb.py [DIRECTORY]        DIRECTORY: write there instead of server/pb

Three things in protoc's output are changed: imports among the files and the messages' `__module__` become
`server.pb.*`, and descriptors go to the package's own pool (see server/pb/__init__.py).
"""

import re
import sys
from importlib.resources import files
from pathlib import Path

from grpc_tools import protoc

ROOT = Path(__file__).resolve().parent.parent
SOURCES = ("model_config.proto", "grpc_service.proto", "load_report.proto")

DEFAULT_POOL = "_descriptor_pool.Default()"
POOL_IMPORT = "from google.protobuf import descriptor_pool as _descriptor_pool\n"
SIBLING = re.compile(r"^import (\w+_pb2) as", re.MULTILINE)


def replaced(text: str, old: str, new: str) -> str:
    """`text` with `old` replaced; protoc's output having changed is an error, not a silent no-op."""
    if old not in text:
        raise SystemExit(f"protoc's output lacks {old!r}: adapt tools/generate_pb.py to this grpcio-tools")
    return text.replace(old, new)


def adapted_stub(text: str) -> str:
    return SIBLING.sub(r"from server.pb import \1 as", text)


def adapted_module(text: str, module: str) -> str:
    text = adapted_stub(text)
    text = replaced(text, DEFAULT_POOL, "_pool")
    text = replaced(text, POOL_IMPORT, "from server.pb import pool as _pool\n")
    return replaced(text, f"DESCRIPTOR, '{module}'", f"DESCRIPTOR, 'server.pb.{module}'")


def generate(directory: Path) -> None:
    """Write the modules and stubs of all sources into `directory`."""
    well_known = files("grpc_tools") / "_proto"
    arguments = [
        "protoc",
        f"-I{ROOT / 'proto'}",
        f"-I{well_known}",
        f"--python_out={directory}",
        f"--pyi_out={directory}",
        *SOURCES,
    ]
    if protoc.main(arguments) != 0:
        raise SystemExit("protoc failed")
    for source in SOURCES:
        module = f"{Path(source).stem}_pb2"
        code, stub = directory / f"{module}.py", directory / f"{module}.pyi"
        code.write_text(adapted_module(code.read_text(), module))
        stub.write_text(adapted_stub(stub.read_text()))


if __name__ == "__main__":
    generate(Path(sys.argv[1]) if len(sys.argv) > 1 else ROOT / "server" / "pb")
