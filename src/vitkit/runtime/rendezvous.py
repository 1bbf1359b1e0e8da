"""How the processes of one start find each other, also after a restart by torchrun."""

import time
from datetime import timedelta
from uuid import uuid4

import torch.distributed as dist

TIMEOUT = timedelta(minutes=10)  # for the slowest process: a large checkpoint, a cold file system


def rendezvous(rank: int, world: int) -> dist.Store:
    """A store for the processes of this start alone.

    torchrun has one store for all its restarts, with the addresses of dead processes still in it (pytorch
    issue 135712). So each process announces itself by a name that was never used, and the main process
    answers with the prefix under which all of this start meet.
    """
    store, _, _ = next(dist.rendezvous("env://", timeout=TIMEOUT))
    store.set_timeout(TIMEOUT)
    name, start, missing = uuid4().hex, time.monotonic(), set(range(1, world))
    if rank:
        store.set(f"hello/{rank}", name)
        prefix = store.get(f"place/{name}").decode()  # blocks until it is there
        store.set(f"here/{prefix}/{rank}", "")
        return dist.PrefixStore(prefix, store)
    while missing:
        for other in sorted(missing):
            if store.check([f"here/{name}/{other}"]):
                missing.remove(other)
            elif store.check([f"hello/{other}"]):
                store.set(f"place/{store.get(f'hello/{other}').decode()}", name)
        if time.monotonic() - start > TIMEOUT.total_seconds():
            raise TimeoutError(f"processes {sorted(missing)} did not start within {TIMEOUT}")
        time.sleep(0.01)
    return dist.PrefixStore(name, store)
