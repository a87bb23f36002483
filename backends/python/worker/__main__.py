"""Start of a worker process: `<python> <this folder> WORK SIDE CALLS ARENA`, the numbers of inherited descriptors.

`multiprocessing` runs this file, too, under another name, in the processes that it does not fork.
"""

import importlib
import importlib.util
import os
import sys


def main() -> int:
    """Serve one model instance."""
    folder = __file__.rpartition("/")[0]
    # The first entry is the script's folder, whose modules the model must not import. If the script is a link, as in
    # environments that link to a cache of packages, it is the folder of the file itself.
    own = (folder, os.path.realpath(__file__).rpartition("/")[0], "")
    sys.path[:] = [place for place in sys.path if place not in own]
    sys.path.append(folder + "/modules")
    for stream in (sys.stdout, sys.stderr):
        stream.reconfigure(line_buffering=True, errors="backslashreplace")  # type: ignore[union-attr]
    work, side, calls, arena = map(int, sys.argv[1:5])
    sys.argv[:] = [""]  # as in Triton: some libraries look for their options there

    importlib.import_module("c_python_backend_utils")
    importlib.import_module("inferd_worker.signals").outlive()
    link = importlib.import_module("inferd_worker.link")
    worker = importlib.import_module("inferd_worker.worker")
    # Without a server the process has no work and no log.
    serving = worker.Worker(link.Link(work, side, calls, arena, lambda: os._exit(1)))
    try:
        return int(serving.run())
    except BaseException:
        importlib.import_module("traceback").print_exc()
        sys.stdout.flush()
        # At once: if the sockets were closed first, the server would kill the process, and report that as its end.
        os._exit(1)


def help_one() -> None:
    """Make a process that `multiprocessing` has started outlive signals, as the worker does."""
    # Without the package, which the task may not need.
    spec = importlib.util.spec_from_file_location("inferd_signals", __file__.rpartition("/")[0] + "/signals.py")
    assert spec is not None and spec.loader is not None
    signals = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(signals)
    signals.outlive_as_helper()


if __name__ == "__main__":
    sys.exit(main())
if __name__ == "__mp_main__":
    help_one()
