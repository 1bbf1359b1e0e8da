"""A queue that is fair to requests: one with many images does not keep the images of others waiting."""

from collections import deque
from dataclasses import dataclass, field
from threading import Lock
from typing import Generic, TypeVar

Item = TypeVar("Item")


@dataclass(eq=False)
class Share(Generic[Item]):
    """What one request has waiting, how much of it is being done, and the seconds that it has taken."""

    waiting: deque[Item] = field(default_factory=deque)
    running: int = 0
    spent: float = 0.0


class FairQueue(Generic[Item]):
    """The next item is of the request with the fewest in work; among equals, the one served longest ago."""

    def __init__(self) -> None:
        self.shares: deque[Share[Item]] = deque()  # with something waiting; last served, last
        self.lock = Lock()

    def put(self, share: Share[Item], item: Item) -> None:
        with self.lock:
            share.waiting.append(item)
            if share not in self.shares:
                self.shares.append(share)

    def take(self) -> tuple[Share[Item], Item] | None:
        """None when nothing waits."""
        with self.lock:
            if not self.shares:
                return None
            share = self.chosen()
            self.shares.remove(share)
            item = share.waiting.popleft()
            share.running += 1
            if share.waiting:
                self.shares.append(share)
            return share, item

    def chosen(self) -> Share[Item]:
        return min(self.shares, key=lambda share: share.running)

    def done(self, share: Share[Item], seconds: float) -> None:
        with self.lock:
            share.running -= 1
            share.spent += seconds

    def clear(self) -> list[Item]:
        """Everything that waits, which is then gone."""
        with self.lock:
            items = [item for share in self.shares for item in share.waiting]
            self.shares.clear()
            return items
