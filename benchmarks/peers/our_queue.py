"""This project's transfer queue, with any of its backends: `our_queue.py --backend memory|shm|ray`."""

import argparse
import multiprocessing
import os
import sys
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from _our_clients import CALL_TIMEOUT_S, TASK, Client, OurQueue, declare
from _payload import NUM_PRODUCERS, payload_bytes
from _protocol import serve

from rl_core import InProcessQueue, TransferQueue
from rl_core.cluster import RayOptions, start_ray, stop_ray
from rl_core.queue import RayQueue, SharedMemoryQueue


@contextmanager
def memory() -> Iterator[OurQueue]:
    """The queue in the process, with threads."""
    declare()
    queue = InProcessQueue([TASK])
    clients = [Client(number, queue, is_verified=False) for number in range(NUM_PRODUCERS)]
    with ThreadPoolExecutor(NUM_PRODUCERS) as threads:

        def crew(numbers: Sequence[int], method: str, arguments: Sequence[Any]) -> list[Any]:
            calls = [threads.submit(getattr(clients[number], method), *arguments) for number in numbers]
            return [call.result(CALL_TIMEOUT_S) for call in calls]

        def measure() -> dict[str, int]:
            before = private_bytes(os.getpid())  # includes the payload, which is kept unchanged
            system.bulk()
            grown = max(private_bytes(os.getpid()) - before, 0)
            return {"peak_bytes": payload_bytes() + grown, "payload_bytes": payload_bytes()}

        system = OurQueue(queue, crew, measure)
        yield system
    queue.close()


class Processes:
    """A process for each client, controlled through pipes."""

    def __init__(self, queue: SharedMemoryQueue) -> None:
        """Start them."""
        context = multiprocessing.get_context("spawn")
        self._queue = queue
        self._pipes, self._processes = [], []
        for number in range(NUM_PRODUCERS):
            ours, theirs = context.Pipe()
            self._processes.append(context.Process(target=work, args=(theirs, number, queue), daemon=True))
            self._processes[-1].start()
            theirs.close()
            self._pipes.append(ours)

    def call(self, numbers: Sequence[int], method: str, arguments: Sequence[Any]) -> list[Any]:
        """A `Crew`."""
        for number in numbers:
            self._pipes[number].send((method, arguments))
        answers = []
        for number in numbers:
            if not self._pipes[number].poll(CALL_TIMEOUT_S):
                raise TimeoutError(f"client {number} did not answer {method} for {CALL_TIMEOUT_S:g} s.")
            answers.append(self._pipes[number].recv())
        return answers

    def measure(self) -> dict[str, int]:
        """Return the peak memory of a round: slots, and the growth of the processes since the start."""
        slots = 0

        def call_and_look(numbers: Sequence[int], method: str, arguments: Sequence[Any]) -> list[Any]:
            nonlocal slots
            answers = self.call(numbers, method, arguments)
            folder = Path(self._queue.address) / "segments"
            slots = max(slots, sum(slot.stat().st_blocks * 512 for slot in folder.iterdir()))
            return answers

        before = self.private_bytes()
        OurQueue(self._queue, call_and_look, lambda: None).bulk()
        return {"peak_bytes": slots + max(self.private_bytes() - before, 0), "payload_bytes": payload_bytes()}

    def private_bytes(self) -> int:
        """Return the private memory of clients and server, without shared memory and files."""
        pids = [*(process.pid for process in self._processes), self._queue.server_pid]
        return sum(private_bytes(pid) for pid in pids if pid is not None)

    def close(self) -> None:
        """End them."""
        for pipe in self._pipes:
            pipe.send(None)
        for process in self._processes:
            process.join(CALL_TIMEOUT_S)


@contextmanager
def shm() -> Iterator[OurQueue]:
    """The queue in shared memory, with a process for each client."""
    declare()
    queue = SharedMemoryQueue([TASK])
    processes = Processes(queue)
    yield OurQueue(queue, processes.call, processes.measure)
    processes.close()
    queue.close()


def work(pipe: Any, number: int, queue: TransferQueue) -> None:
    """A client's process."""
    client = Client(number, queue, is_verified=True)
    while (request := pipe.recv()) is not None:
        method, arguments = request
        pipe.send(getattr(client, method)(*arguments))


def private_bytes(pid: int) -> int:
    """Return a process's private memory."""
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    fields = dict(line.split(":", 1) for line in lines)
    return int(fields["RssAnon"].split()[0]) * 1024


@contextmanager
def on_ray() -> Iterator[OurQueue]:
    """The queue on a Ray cluster for this process, with an actor for each client."""
    declare()
    ray = start_ray(RayOptions(num_cpus=2, object_store_bytes=1 << 30))
    try:
        queue = RayQueue([TASK])
        actor: Any = ray.remote(num_cpus=0)(Client)
        clients = [actor.remote(number, queue, is_verified=True) for number in range(NUM_PRODUCERS)]

        def crew(numbers: Sequence[int], method: str, arguments: Sequence[Any]) -> list[Any]:
            answers = [getattr(clients[number], method).remote(*arguments) for number in numbers]
            return list(ray.get(answers, timeout=CALL_TIMEOUT_S))

        yield OurQueue(queue, crew, lambda: None)
        queue.close()
    finally:
        stop_ray()


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--backend", choices=["memory", "shm", "ray"], required=True)
    backends: dict[str, Any] = {"memory": memory, "shm": shm, "ray": on_ray}
    sys.exit(serve(backends[parser.parse_args().backend]))
