"""Processes: how those of one start find each other, and how they exchange values."""

import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any
from uuid import uuid4

import torch
import torch.distributed as dist
from torch import Tensor

from vitkit.errors import Error, code_of

TIMEOUT = timedelta(minutes=10)  # for the slowest process: a large checkpoint, a cold file system


class Collectives:
    """What the processes of a run exchange; with a single process each call returns its argument."""

    rank: int
    world: int

    @property
    def is_main(self) -> bool:
        """Whether this process prints and writes for all."""
        return self.rank == 0

    def all_reduce_sum(self, value: Tensor) -> Tensor:
        """The sum over all processes, in place."""
        if self.world > 1:
            dist.all_reduce(value)
        return value

    def all_reduce_max(self, *numbers: float) -> list[float]:
        """The maximum over all processes of each number."""
        if self.world == 1:
            return list(numbers)
        largest = torch.tensor(numbers, dtype=torch.float64)
        dist.all_reduce(largest, dist.ReduceOp.MAX)
        return largest.tolist()

    def all_gather_rows(self, value: Tensor) -> Tensor:
        """The rows of all processes in rank order; each process may have another number of them."""
        return torch.cat(self.all_gather_object(value.cpu())) if self.world > 1 else value

    def all_gather_object(self, value: Any) -> list[Any]:
        """The value of each process, in rank order."""
        if self.world == 1:
            return [value]
        values: list[Any] = [None] * self.world
        dist.all_gather_object(values, value)
        return values

    def broadcast(self, value: Any) -> Any:
        """The main process's value, on every process."""
        return self.all_gather_object(value)[0]

    def on_main_first(self, act: Callable[[], Any], timeout: timedelta | None = None) -> Any:
        """The main process's result of `act`, on every process; so is an error that it raises for the user.

        timeout: of the other processes, where `act` may take longer than a step or a checkpoint.
        """
        if self.world == 1:
            return act()
        group = dist.new_group(backend="gloo", timeout=timeout) if timeout else None
        result: list[Any] = [None, None]
        failure: Exception | None = None
        if self.is_main:
            try:
                result[0] = act()
            except (ValueError, OSError) as error:
                failure = error
                result[1] = (isinstance(error, OSError), str(error), code_of(error))
        dist.broadcast_object_list(result, src=0, group=group)
        if result[1]:
            self.barrier()  # no process exits before all have the error
            from_system, text, code = result[1]
            raise failure or (OSError(text) if from_system else Error(text, code=code))
        return result[0]

    def barrier(self) -> None:
        """Wait until every process is here."""
        self.all_reduce_max(0)

    def local_places(self, batch: int) -> range:
        """This process's places in a global batch."""
        if batch % self.world:
            raise Error(
                f"a batch of {batch} images cannot be shared by {self.world} processes; "
                f"give --batch {self.world * max(1, round(batch / self.world))}",
                code="request.value",
            )
        each = batch // self.world
        return range(self.rank * each, (self.rank + 1) * each)


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
