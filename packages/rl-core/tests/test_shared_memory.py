"""The queue in shared memory: the conformance suite, and what is its own."""

import threading

import pytest

from rl_core.queue.server import QueueServer
from rl_core.queue.shared_memory import SharedMemoryQueue
from rl_core.testing import QueueConformance


class _Served(SharedMemoryQueue):
    """A queue whose keeper is a thread of this process, so that a test owns its clock."""

    server: QueueServer
    thread: threading.Thread

    def close(self) -> None:
        self.server.stop()
        self.thread.join()
        super().close()


class TestSharedMemoryQueue(QueueConformance):
    @pytest.fixture(autouse=True)
    def _folder(self, tmp_path):
        self.tmp_path = tmp_path
        self.num_made = 0

    def make_queue(self, tasks, *, options, clock):
        self.num_made += 1
        server = QueueServer(self.tmp_path / str(self.num_made), tasks, options, clock=clock)
        thread = threading.Thread(target=server.serve)
        thread.start()
        queue = _Served.connect(str(self.tmp_path / str(self.num_made)))
        queue.server, queue.thread = server, thread
        return queue
