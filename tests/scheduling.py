"""In which order files of tests are given to processes, and what becomes of the rest when a process ends."""

from __future__ import annotations

from xdist.scheduler.loadfile import LoadFileScheduling
from xdist.workermanage import WorkerController

LONGEST = (
    "tests/proxy/test_proxy.py",
    "tests/backends/test_tensorflow.py",
    "tests/backends/python/test_hostile.py",
    "tests/backends/python/test_language.py",
    "tests/examples/test_digits.py",
    "tests/backends/test_inductor.py",
    "tests/tools/test_commands.py",
    "tests/engine/test_requests_stateful.py",
    "tests/simulation/test_simulation.py",
    "tests/packaging/test_client_wheel.py",
    "tests/backends/python/test_chaos.py",
    "tests/conformance/test_connections.py",
    "tests/front/test_drain.py",
    "tests/backends/test_pytorch_runtime.py",
    "tests/engine/test_linear.py",
    "tests/engine/test_crosstalk.py",
    "tests/backends/python/test_scripts.py",
)
"""The files that take longest, which are begun with: one that is begun last keeps the other processes waiting."""


class LongestFirst(LoadFileScheduling):
    """A file of tests is run by one process. The longest files are begun with, then those of many tests."""

    def _assign_work_unit(self, node: WorkerController) -> None:
        """Give a process the file that is next."""
        for file in LONGEST:
            if file in self.workqueue:
                self.workqueue.move_to_end(file, last=False)
                break
        super()._assign_work_unit(node)

    def remove_node(self, node: WorkerController) -> str | None:
        """Take the work of a process that has ended, and give others what it has left.

        The test that it was ended in is not among it: another process would be ended in it as well, and so on.

        Returns:
            That test; None if nothing was left.
        """
        work = self.assigned_work.pop(node)
        left = [(file, test) for file, tests in work.items() for test, done in tests.items() if not done]
        if not left:
            return None
        file, crashed = left[0]
        work[file][crashed] = True
        self.workqueue.update({file: work[file] for file, _ in left[1:]})
        for other in self.assigned_work:
            self._reschedule(other)
        return crashed
