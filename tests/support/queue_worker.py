"""A producer or consumer in a separate process, which can be killed: `python queue_worker.py ROLE ADDRESS`."""

import itertools
import sys
import threading

import numpy as np

from rl_core.errors import (
    AlreadySettledError,
    DataError,
    DeadlineError,
    JournalError,
    NothingToLeaseError,
    NotReadyError,
    OutdatedLeaseError,
)
from rl_core.queue.shared_memory.queue import SharedMemoryQueue
from rl_core.queue.shared_memory.slots import SlotRows
from rl_core.testing import make_trajectory, ragged_like

DEADLINE_S = 60.0
LONG = 20_000


def value_of(uid, session):
    return float(np.float32(-int(uid[1:]) - session / 8))


def say(line):
    sys.stdout.write(line + "\n")
    sys.stdout.flush()


def insist(call, *arguments, **options):
    """Retry while the journal's disk is full."""
    while True:
        try:
            return call(*arguments, **options)
        except JournalError as error:
            say(f"refused {error}")
            threading.Event().wait(0.05)  # for room


def produce(queue):
    """Claim prompts and put their sessions; the rows of every third prompt are large enough for a slot."""
    while True:
        claim = insist(queue.claim, prompts=3, deadline_s=DEADLINE_S, claim_s=DEADLINE_S)
        for prompt, sessions in zip(claim.prompts, claim.sessions, strict=True):
            for session in sessions:
                tokens = 4_000 if int(prompt.uid[1:]) % 3 == 0 else 5
                row = make_trajectory(prompt.uid, session, num_response_tokens=tokens)
                try:
                    insist(queue.put, prompt.uid, session, [row], deadline_s=DEADLINE_S)
                except (AlreadySettledError, DataError):
                    continue  # this claim expired, and another producer was faster


def consume(queue, task):
    """Lease and check rows, add the task's column, ack or finish them, and print their prompts."""
    for turn in itertools.count():
        try:
            lease = insist(queue.lease, task, groups=4, deadline_s=DEADLINE_S, lease_s=DEADLINE_S, allow_fewer=True)
        except NothingToLeaseError:
            say("over")
            return
        values = [value_of(key.prompt_uid, key.session_index) for key in lease.batch.keys]
        given = {}
        if task != "train":
            given = {f"{task}_logprobs": ragged_like(lease.batch, f"{task}_logprobs", values)}
        else:
            for name in ("reference_logprobs", "teacher_logprobs"):
                if [float(row[0]) for row in lease.batch.ragged(name)] != values:
                    say(f"wrong {name}: {lease.batch.keys}")
                    sys.exit(3)
        try:
            if task == "train" and turn % 2:
                insist(queue.release, lease)
                insist(queue.finish, task, [prompt.uid for prompt in lease.prompts])
            else:
                insist(queue.ack, lease, given)
        except (OutdatedLeaseError, DataError):
            continue  # the lease expired, and another consumer has it or had it
        say("acked " + " ".join(prompt.uid for prompt in lease.prompts))


def hang_in_put(queue):
    """Reserve space, write half of it, and wait."""

    def write(self, prepared, place):
        self._mapped(place)[: prepared.size_bytes // 2] = 7
        say("writing")
        threading.Event().wait()

    SlotRows.write = write
    queue.put("p0", 0, [make_trajectory("p0", 0, num_response_tokens=LONG)])


def hold_lease(queue):
    """Lease, read the rows, and wait."""
    lease = queue.lease("train", groups=1, deadline_s=DEADLINE_S)
    say(f"leased {lease.prompts[0].uid} {int(lease.batch.ragged('input_ids')[0].sum())}")
    threading.Event().wait()


def main():
    role, address = sys.argv[1:]
    queue = SharedMemoryQueue.connect(address)
    try:
        match role:
            case "producer":
                produce(queue)
            case "hang_in_put":
                hang_in_put(queue)
            case "hold_lease":
                hold_lease(queue)
            case _:
                consume(queue, role)
    except (DeadlineError, NotReadyError) as error:
        say(f"ended: {error}")


if __name__ == "__main__":
    main()
