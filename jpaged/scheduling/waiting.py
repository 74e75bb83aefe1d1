"""The queue of requests that wait for a row, and the order in which they should get one.

Policies: `fcfs` by arrival; `lpm` longest cached prefix first (Zheng et al. 2024, "SGLang"), looked up
again each step for at most LOOKUP_WINDOW requests; `dfs` depth first over the tree of the waiting
requests' prompts, in windows of DFS_WINDOW requests, for batches that are known beforehand.

Preempted requests go first whatever the policy, oldest first. A request that has been passed over for
MAX_WAIT steps goes before all that arrived later, so nobody starves.
"""

from __future__ import annotations

import bisect
import itertools
from collections.abc import Callable, Iterator
from typing import Literal, get_args

from jpaged.request import Request

SchedulePolicy = Literal["fcfs", "lpm", "dfs"]

LOOKUP_WINDOW = 128
DFS_WINDOW = 4096
MAX_WAIT = 256  # steps


class WaitingQueue:
    """Waiting requests; each operation but the ordering takes constant time."""

    def __init__(self, policy: SchedulePolicy, num_cached_tokens: Callable[[Request], int]):
        """Makes an empty queue.

        Args:
          num_cached_tokens: how much of a request's prompt is cached now.

        Raises:
          ValueError: the policy is unknown.
        """
        if policy not in get_args(SchedulePolicy):
            raise ValueError(f"schedule_policy={policy!r} must be one of {get_args(SchedulePolicy)}")
        self._policy = policy
        self._num_cached_tokens = num_cached_tokens
        self._preempted: list[Request] = []  # by arrival
        self._new: dict[str, Request] = {}  # by arrival
        self._since: dict[str, int] = {}  # step at which a new request could first have been taken
        self._dfs_order: list[Request] = []

    def __len__(self) -> int:
        return len(self._preempted) + len(self._new)

    def __iter__(self) -> Iterator[Request]:
        return itertools.chain(self._preempted, self._new.values())

    def add(self, request: Request) -> None:
        """Queues a request that arrived after all others."""
        self._new[request.request_id] = request

    def add_preempted(self, request: Request) -> None:
        """Queues a request that ran before."""
        bisect.insort(self._preempted, request, key=lambda other: other.arrival)

    def remove(self, request: Request) -> None:
        """Takes a request out that was admitted or has ended."""
        if self._new.pop(request.request_id, None) is None:
            self._preempted.remove(request)
        self._since.pop(request.request_id, None)

    def candidates(self, step: int) -> list[Request]:
        """At most LOOKUP_WINDOW requests in the order in which they should be admitted at `step`."""
        if self._policy == "dfs":
            window = self._depth_first()
        else:
            window = list(itertools.islice(self._new.values(), LOOKUP_WINDOW))
        if self._policy != "fcfs":
            window = self._aged_first(window, step)
        return self._preempted[:LOOKUP_WINDOW] + window

    def _aged_first(self, window: list[Request], step: int) -> list[Request]:
        oldest = itertools.islice(self._new.values(), LOOKUP_WINDOW)
        aged = [r for r in oldest if step - self._since.setdefault(r.request_id, step) >= MAX_WAIT]
        others = [request for request in window if request not in aged]
        if self._policy == "lpm":
            others.sort(key=self._num_cached_tokens, reverse=True)
        return aged + others

    def _depth_first(self) -> list[Request]:
        """The next requests of the order that was made for a window; a new one when it is used up.

        Prompts in lexicographic order are the leaves of their tree in depth-first order.
        """
        order = [r for r in self._dfs_order[-LOOKUP_WINDOW:] if self._new.get(r.request_id) is r]
        while self._dfs_order and self._new.get(self._dfs_order[-1].request_id) is not self._dfs_order[-1]:
            self._dfs_order.pop()
        if not order and self._new:
            window = itertools.islice(self._new.values(), DFS_WINDOW)
            self._dfs_order = sorted(window, key=lambda r: (r.cache_salt or "", r.token_ids), reverse=True)
            order = self._dfs_order[-LOOKUP_WINDOW:]
        return order[::-1]
