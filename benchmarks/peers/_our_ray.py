"""This project's queue on Ray, with an actor for each client."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from _payload import NUM_PRODUCERS
from our_queue import CALL_TIMEOUT_S, TASK, Client, OurQueue, declare

from rl_core.queue.ray_queue import RayQueue
from rl_core.ray_session import RayOptions, start_ray, stop_ray


@contextmanager
def opened() -> Iterator[OurQueue]:
    """A Ray of this process alone, the queue, and the clients."""
    declare()
    ray = start_ray(RayOptions(num_cpus=2, object_store_bytes=1 << 30))
    try:
        queue = RayQueue([TASK])
        actor: Any = ray.remote(num_cpus=0)(Client)
        clients = [actor.remote(number, queue) for number in range(NUM_PRODUCERS)]

        def crew(numbers: Sequence[int], method: str, arguments: Sequence[Any]) -> list[Any]:
            answers = [getattr(clients[number], method).remote(*arguments) for number in numbers]
            return list(ray.get(answers, timeout=CALL_TIMEOUT_S))

        yield OurQueue(queue, crew, lambda: None)
        queue.close()
    finally:
        stop_ray()
