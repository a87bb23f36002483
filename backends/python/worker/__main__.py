"""Start of a worker process: `<python> <this folder> WORK SIDE CALLS ARENA`, the numbers of inherited descriptors."""

import importlib
import os
import sys


def main() -> int:
    """Serve one model instance."""
    folder = __file__.rpartition("/")[0]
    # The first entry is the script's folder, whose modules are none of the model's business.
    sys.path[:] = [place for place in sys.path if place not in (folder, "")]
    sys.path.append(folder + "/modules")
    for stream in (sys.stdout, sys.stderr):
        stream.reconfigure(line_buffering=True, errors="backslashreplace")  # type: ignore[union-attr]
    work, side, calls, arena = map(int, sys.argv[1:5])
    sys.argv[:] = [""]  # as in Triton: there are libraries that look for options of their own

    importlib.import_module("c_python_backend_utils")
    importlib.import_module("inferd_worker.signals").outlive()
    link = importlib.import_module("inferd_worker.link")
    worker = importlib.import_module("inferd_worker.worker")
    # Without a server there is nobody to work for, and nobody to report to.
    return int(worker.Worker(link.Link(work, side, calls, arena, lambda: os._exit(1))).run())


if __name__ == "__main__":
    sys.exit(main())
