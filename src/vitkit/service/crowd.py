"""Who is connected: how many in all and of one address, and whose connection is closed for a newcomer."""

from collections import Counter, defaultdict
from typing import Protocol


class Connection(Protocol):
    """What the crowd knows of a connection."""

    address: str

    def make_way(self) -> None: ...


class Crowd:
    """Counts connections. Where there are too many, the one that has waited longest for a request goes."""

    def __init__(self, most: int) -> None:
        self.most, self.of_one_address = most, max(1, most // 2)
        self.open: Counter[str] = Counter()
        self.total = 0
        self.waiting: defaultdict[str, dict[Connection, None]] = defaultdict(dict)  # the longest first

    def enter(self, one: Connection) -> bool:
        """Count a newcomer; False where it cannot stay, since everybody else is being answered."""
        self.open[one.address] += 1
        self.total += 1
        if self.open[one.address] > self.of_one_address:
            return self.close_one_of(one.address)
        if self.total > self.most:
            return self.close_one_of(max(self.waiting, key=lambda each: len(self.waiting[each]), default=""))
        return True

    def close_one_of(self, address: str) -> bool:
        waiting = self.waiting.get(address)
        if not waiting:
            return False
        oldest = next(iter(waiting))
        self.busy(oldest)
        oldest.make_way()
        return True

    def idle(self, one: Connection) -> None:
        """It waits for a request, or for the rest of one's head."""
        self.busy(one)
        self.waiting[one.address][one] = None

    def busy(self, one: Connection) -> None:
        """It is being answered, or has gone."""
        mine = self.waiting.get(one.address, {})
        mine.pop(one, None)
        if not mine:
            self.waiting.pop(one.address, None)

    def leave(self, one: Connection) -> None:
        self.busy(one)
        self.total -= 1
        self.open[one.address] -= 1
        if not self.open[one.address]:
            del self.open[one.address]
