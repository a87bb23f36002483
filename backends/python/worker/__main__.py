"""Start of a worker process: `<python> <this folder> WORK SIDE CALLS ARENA`, the numbers of four inherited descriptors.

The interpreter is the model's own and need not have inferd installed, so this folder is made a package by hand, under a
name that hides nothing of the model's.
"""

import importlib.util
import os
import sys

PACKAGE = "inferd_worker"


def main() -> int:
    """Serve one model instance."""
    folder = __file__.rpartition("/")[0]
    # The first entry is the script's folder, whose modules are none of the model's business.
    sys.path[:] = [place for place in sys.path if place not in (folder, "")]
    spec = importlib.util.spec_from_file_location(PACKAGE, folder + "/__init__.py", submodule_search_locations=[folder])
    assert spec is not None and spec.loader is not None
    package = importlib.util.module_from_spec(spec)
    sys.modules[PACKAGE] = package
    spec.loader.exec_module(package)
    for stream in (sys.stdout, sys.stderr):
        stream.reconfigure(line_buffering=True, errors="backslashreplace")  # type: ignore[union-attr]

    facade = importlib.import_module(PACKAGE + ".utils")
    sys.modules["triton_python_backend_utils"] = facade
    sys.modules["c_python_backend_utils"] = facade
    link = importlib.import_module(PACKAGE + ".link")
    worker = importlib.import_module(PACKAGE + ".worker")
    work, side, calls, arena = map(int, sys.argv[1:5])
    sys.argv[:] = [""]  # as in Triton: there are libraries that look for options of their own
    # Without a server there is nobody to work for, and nobody to report to.
    return int(worker.Worker(link.Link(work, side, calls, arena, lambda: os._exit(1))).run())


if __name__ == "__main__":
    sys.exit(main())
