"""Run simulations: `python -m tests.simulation --seeds 1000` (command.py), in a process in which all has its place.

The process replaces itself before it imports what simulations need, which takes longer than a short simulation.
"""

import ctypes
import os
import sys

FIXED = {"PYTHONHASHSEED": "0", "OPENBLAS_NUM_THREADS": "1", "INFERD_SIMULATION": "fixed"}
ADDR_NO_RANDOMIZE = 0x0040000  # of <sys/personality.h>

if not os.environ.items() >= FIXED.items():
    # Python orders the objects of a set by their addresses: these must be the same in each run.
    ctypes.CDLL(None).personality(ADDR_NO_RANDOMIZE)
    os.execve(sys.executable, [sys.executable, "-m", "tests.simulation", *sys.argv[1:]], os.environ | FIXED)

if __name__ == "__main__":
    from tests.simulation.command import main

    sys.exit(main())
