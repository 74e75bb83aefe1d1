"""Continuous batching: which requests compute how many tokens in the next step.

Owns the waiting and running sets and the rows. Blocks belong to `KVManager`, tokens to the device.
Plain data goes out (`ScheduledStep`) and comes back (sampled ids); a step may be scheduled before
the ids of the one before it are known.

Policy. Every running sequence that decodes gets its token. Of what is left of the step's token
budget, half goes to prefills under way, oldest first; the other half to those that it completes,
then to waiting requests in the queue's order; what remains to prefills under way again. So a long prompt
always advances, and never keeps short ones out for longer than it takes to admit those before them
and to compute them at half the budget a step. When blocks run out,
the newest running request is preempted: it gives up its blocks and is computed again later. The
oldest is never preempted while another runs, so it always progresses. A waiting request lets others
pass while a running one computes a prefix of its prompt: then it finds it in the cache.
"""

from __future__ import annotations

import bisect
import dataclasses
from collections.abc import Iterable, Mapping

from jpaged.request import FinishReason, Request, RequestStatus
from jpaged.sampling_params import SamplingParams
from jpaged.scheduling.kv_manager import BlockCopy, KVManager
from jpaged.scheduling.waiting import SchedulePolicy, WaitingQueue


@dataclasses.dataclass(frozen=True, slots=True)
class AdmittedRow:
    """A request that takes a row in this step: what the device must know of it from now on."""

    row: int
    request_id: str
    params: SamplingParams
    seed: int
    choice: int
    stop_ids: tuple[int, ...]
    token_ids: tuple[int, ...]  # known ids, prompt first
    num_prompt_tokens: int


@dataclasses.dataclass(slots=True)  # not frozen, which would take four times as long to make
class ScheduledSequence:
    """The tokens [start, start + num_tokens) of one sequence.

    Attributes:
      token_ids: their ids, or `None` where the one token is the last one sampled in this row.
      samples: whether the token after them is drawn.
      prompt_targets: for each of them the prompt token that follows, if its log-probability is
        wanted (one fewer at the end of the prompt).
      table_start, table_blocks: the row's block table from entry `table_start` on, as far as it
        changed since the row was last scheduled.
    """

    request_id: str
    row: int
    start: int
    num_tokens: int
    token_ids: tuple[int, ...] | None
    samples: bool
    prompt_targets: tuple[int, ...] | None
    table_start: int
    table_blocks: tuple[int, ...]

    @property
    def end(self) -> int:
        return self.start + self.num_tokens


@dataclasses.dataclass(frozen=True, slots=True)
class ScheduledStep:
    """One step as plain data. Copies come first, all at once; then the tokens are computed."""

    number: int
    sequences: tuple[ScheduledSequence, ...]
    admitted: tuple[AdmittedRow, ...]
    copies: tuple[BlockCopy, ...] = ()

    @property
    def num_tokens(self) -> int:
        return sum(sequence.num_tokens for sequence in self.sequences)


@dataclasses.dataclass(slots=True)
class SchedulerStats:
    """Counts since the start. Slots are counted once per step, as that step leaves them."""

    steps: int = 0
    preemptions: int = 0
    scheduled_tokens: int = 0
    slots_allocated: int = 0
    slots_filled: int = 0
    peak_blocks: int = 0
    peak_running: int = 0

    @property
    def kv_waste(self) -> float:
        """Share of allocated KV slots that held no token, over all steps."""
        return 1 - self.slots_filled / self.slots_allocated if self.slots_allocated else 0.0


class Scheduler:
    """Decides what every step computes."""

    def __init__(
        self,
        kv: KVManager,
        *,
        max_num_seqs: int,
        max_num_batched_tokens: int,
        policy: SchedulePolicy = "fcfs",
    ):
        if max_num_batched_tokens < max_num_seqs:
            raise ValueError(f"{max_num_batched_tokens=} must be at least {max_num_seqs=}")
        self.kv = kv
        self.max_num_batched_tokens = max_num_batched_tokens
        self.stats = SchedulerStats()
        self.waiting = WaitingQueue(policy, kv.num_cached_tokens)
        self.running: list[Request] = []  # in order of arrival
        self._requests: dict[str, Request] = {}
        self._free_rows = list(range(max_num_seqs - 1, -1, -1))
        self._awaited: dict[str, Request] = {}  # whose prefill a waiting request waits for

    # -- requests -----------------------------------------------------------------------------

    def add(self, request: Request) -> None:
        """Queues a request.

        Raises:
          ValueError: its id is in use, or its known tokens can never fit.
        """
        if request.request_id in self._requests:
            raise ValueError(f"request_id={request.request_id!r} is already in use")
        if request.num_tokens > self.kv.capacity:
            raise ValueError(
                f"a prompt of {request.num_tokens} tokens can never fit: the KV cache holds "
                f"{self.kv.capacity} tokens ({self.kv.pool.num_blocks} blocks of {self.kv.block_size})"
            )
        # The last token is sampled but never stored, hence one more than the pool holds.
        request.max_total_tokens = min(request.max_total_tokens, self.kv.capacity + 1)
        self._requests[request.request_id] = request
        self.waiting.add(request)

    def get(self, request_id: str) -> Request | None:
        """The unfinished request of that id."""
        return self._requests.get(request_id)

    def requests(self) -> Iterable[Request]:
        """All unfinished requests."""
        return self._requests.values()

    @property
    def has_unfinished(self) -> bool:
        return bool(self._requests)

    def finish(self, request: Request, reason: FinishReason, stop_reason: int | str | None = None) -> None:
        """Ends a request in whatever state it is; its blocks and row are free for the next step."""
        if request.status is RequestStatus.RUNNING:
            self._leave_row(request, keep=reason is not FinishReason.ERROR)
        else:
            self.waiting.remove(request)
            self._awaited.pop(request.request_id, None)
        request.status = RequestStatus.FINISHED
        request.finish_reason, request.stop_reason = reason, stop_reason
        del self._requests[request.request_id]

    def preempt(self, request: Request) -> None:
        """Takes blocks and row from a running request and puts it at the head of the queue.

        Its known tokens are computed again later; a token that is still on the device is kept.
        """
        self._leave_row(request)
        request.status = RequestStatus.WAITING
        request.num_preemptions += 1
        self.stats.preemptions += 1
        self.waiting.add_preempted(request)

    def _preempt_paused(self) -> bool:
        """Makes room for those that wait and could run, where only paused requests are in their way."""
        paused = [request for request in self.running if request.paused]
        if not paused or all(r.paused or r.num_pending for r in self.waiting):
            return False
        self.preempt(paused[-1])
        return True

    def replace_last_token(self, request: Request, token: int) -> None:
        """Lets a paused request go on from another token than the one that was sampled."""
        assert request.status is RequestStatus.RUNNING and not request.num_pending
        assert request.num_scheduled == request.num_tokens - 1, "the last token is stored already"
        request.token_ids[-1] = token
        request.num_from_host = request.num_tokens  # not the one on the device

    def _leave_row(self, request: Request, *, keep: bool = True) -> None:
        self.kv.release(request, keep=keep)
        self.running.remove(request)
        assert request.row is not None
        self._free_rows.append(request.row)
        request.row = None

    # -- a step -------------------------------------------------------------------------------

    def schedule(self) -> ScheduledStep | None:
        """Plans the next step and books its tokens; `None` if there is nothing to compute."""
        self.kv.unpin()
        self.kv.commit_all(self.running)
        grants: dict[Request, int] = {}
        admitted: list[Request] = []
        prefills = self._grant_decodes(grants)
        budget = self.max_num_batched_tokens - len(grants)
        budget -= self._grant_prefills(prefills, grants, (budget + 1) // 2)
        budget -= self._grant_prefills(prefills, grants, budget, only_if_completed=True)
        budget -= self._admit(grants, admitted, budget)
        self._grant_prefills(prefills + admitted, grants, budget)
        while not grants and self._preempt_paused():
            self._admit(grants, admitted, budget)
        if not grants:
            return None
        rows = tuple(self._admitted_row(request) for request in admitted if request in grants)
        sequences = tuple([self._book(request, count) for request, count in grants.items()])
        copies = self.kv.take_copies()
        self._count(sum(grants.values()))
        return ScheduledStep(self.stats.steps, sequences, rows, copies)

    def _todo(self, request: Request) -> int:
        """Tokens of a running request that could be computed now, pending ones included."""
        total = len(request.token_ids) + request.num_pending
        if total >= request.max_total_tokens or (request.pause_at is not None and request.paused):
            return 0
        return total - request.num_scheduled

    def _decodes(self, request: Request) -> bool:
        """Whether all that is left to compute is the last token that was sampled in its row."""
        return request.num_scheduled >= request.num_from_host

    def _grant_decodes(self, grants: dict[Request, int]) -> list[Request]:
        """Gives every decoding sequence its token; returns the prefills under way, oldest first."""
        size = self.kv.block_size
        prefills = []
        for request in list(self.running):
            scheduled = request.num_scheduled
            if scheduled < request.num_from_host:
                prefills.append(request)
                continue
            if request.row is None or self._todo(request) != 1:
                continue
            if scheduled < len(request.block_ids) * size or self._make_room(request, scheduled + 1, grants):
                grants[request] = 1
        return prefills

    def _grant_prefills(
        self,
        prefills: list[Request],
        grants: dict[Request, int],
        budget: int,
        *,
        only_if_completed: bool = False,
    ) -> int:
        """Gives `prefills`, in their order, up to `budget` more tokens; returns how many."""
        left = budget
        for request in prefills:
            if left <= 0:
                break
            if request.row is None:  # preempted meanwhile
                continue
            have = grants.get(request, 0)
            todo = self._todo(request) - have
            if only_if_completed and todo > left:
                continue
            count = min(todo, left)
            if count > 0 and self._make_room(request, request.num_scheduled + have + count, grants):
                grants[request] = have + count
                left -= count
        return budget - left

    def _admit(self, grants: dict[Request, int], admitted: list[Request], budget: int) -> int:
        """Moves waiting requests into rows while tokens, rows and blocks last; returns tokens used."""
        left = budget
        if left <= 0 or not self._free_rows or not self.waiting:
            return 0
        promised = sum(self._promised(request) for request in self.running if not self._decodes(request))
        for request in self.waiting.candidates(self.stats.steps):
            if left <= 0 or not self._free_rows:
                break
            # A token still on the device will be known after the next update.
            if request.num_pending or request.paused or self._should_wait(request):
                continue
            if not self.kv.acquire(request, promised):
                break
            self.waiting.remove(request)
            self._awaited.pop(request.request_id, None)
            self._enter_row(request)
            count = min(self._todo(request), left)
            if not self.kv.extend(request, request.num_scheduled + count):
                raise AssertionError("an admitted request's known tokens must fit")
            admitted.append(request)
            grants[request] = count
            left -= count
            promised += self._promised(request)
        return budget - left

    def _should_wait(self, request: Request) -> bool:
        """Whether a running request is computing more of this one's prompt than is cached.

        Waiting begins when it saves at least a block; it then lasts until nothing more is coming.
        """
        if self.kv.cache is None or request.params.prompt_logprobs is not None:
            return False
        computing = [r for r in self.running if not self._decodes(r)]
        if not computing:
            return False
        cached = self.kv.num_cached_tokens(request)
        awaited = self._awaited.pop(request.request_id, None)
        size = self.kv.block_size
        next_block = request.token_ids[cached : cached + size]
        for other in computing:
            if other is awaited:
                least = 1
            elif other.token_ids[cached : cached + size] == next_block:
                least = size
            else:
                continue
            if self._shared_tokens(request, other) - cached >= least:
                self._awaited[request.request_id] = other
                return True
        return False

    def _shared_tokens(self, request: Request, other: Request) -> int:
        """Tokens at the start of both that will be in full blocks of the other, all but the last at most."""
        if request.cache_salt != other.cache_salt:
            return 0
        size = self.kv.block_size
        longest = min(request.num_tokens - 1, other.num_tokens // size * size)
        if request.token_ids[:longest] == other.token_ids[:longest]:
            return longest
        return bisect.bisect_left(
            range(longest), True, key=lambda n: request.token_ids[: n + 1] != other.token_ids[: n + 1]
        )

    def _promised(self, request: Request) -> int:
        """Blocks that a running request still needs for its known tokens."""
        return max(0, self.kv.blocks_for(request.num_tokens) - len(request.block_ids))

    def _enter_row(self, request: Request) -> None:
        request.row = self._free_rows.pop()
        request.status = RequestStatus.RUNNING
        request.num_from_host = request.num_tokens
        request.table_changed = 0
        position = len(self.running)
        while position and self.running[position - 1].arrival > request.arrival:
            position -= 1
        self.running.insert(position, request)

    def _make_room(self, request: Request, num_tokens: int, grants: dict[Request, int]) -> bool:
        """Extends a request's blocks, preempting the newest others; `False` if it had to go itself."""
        while not self.kv.extend(request, num_tokens):
            victim = self.running[-1]
            self.preempt(victim)
            grants.pop(victim, None)
            if victim is request:
                return False
        return True

    # -- writing the step down ----------------------------------------------------------------

    def _admitted_row(self, request: Request) -> AdmittedRow:
        assert request.row is not None
        return AdmittedRow(
            row=request.row,
            request_id=request.request_id,
            params=request.params,
            seed=request.seed,
            choice=request.index,
            stop_ids=tuple(sorted(request.stop_ids)),
            token_ids=tuple(request.token_ids),
            num_prompt_tokens=request.num_prompt_tokens,
        )

    def _book(self, request: Request, count: int) -> ScheduledSequence:
        """Notes that `count` more tokens of the request are on the device."""
        assert request.row is not None and count > 0
        start, end = request.num_scheduled, request.num_scheduled + count
        on_device = start >= request.num_from_host
        samples = end == len(request.token_ids) + request.num_pending
        targets = None
        if start < request.num_prompt_tokens and request.params.prompt_logprobs is not None:
            targets = tuple(request.token_ids[start + 1 : min(end + 1, request.num_prompt_tokens)])
        table_start, table_end = request.table_changed, len(request.block_ids)
        table_blocks = tuple(request.block_ids[table_start:]) if table_start < table_end else ()
        request.table_changed = table_end
        request.num_scheduled = end
        request.num_pending += samples
        return ScheduledSequence(
            request.request_id,
            request.row,
            start,
            count,
            None if on_device else tuple(request.token_ids[start:end]),
            samples,
            targets,
            table_start,
            table_blocks,
        )

    def _count(self, num_tokens: int) -> None:
        stats, active = self.stats, self.kv.num_active
        stats.steps += 1
        stats.scheduled_tokens += num_tokens
        stats.slots_allocated += active * self.kv.block_size
        stats.slots_filled += self._filled_slots()
        stats.peak_blocks = max(stats.peak_blocks, active)
        stats.peak_running = max(stats.peak_running, len(self.running))

    def _filled_slots(self) -> int:
        """Slots of active blocks that hold a token; a block that several share counts once."""
        if self.kv.cache is None:
            return sum([request.num_scheduled for request in self.running])
        size = self.kv.block_size
        partial = sum([len(r.block_ids) * size - r.num_scheduled for r in self.running])
        return self.kv.num_active * size - partial

    # -- what came back -----------------------------------------------------------------------

    def update(
        self, step: ScheduledStep, tokens: Mapping[str, int], failures: Mapping[str, str]
    ) -> list[Request]:
        """Takes the sampled ids of a step, by request id, and ends what they end.

        Args:
          failures: why there is no token, for requests that got none; they end with an error.

        Returns:
          the requests that got a token or failed, in the step's order. Tokens of requests that have
          ended meanwhile are dropped.
        """
        self.kv.unpin()
        progressed = []
        for sequence in step.sequences:
            request_id = sequence.request_id
            request = self._requests.get(request_id)
            if not sequence.samples or request is None:
                continue
            request.num_pending -= 1
            progressed.append(request)
            if request_id in failures:
                self.finish(request, FinishReason.ERROR, failures[request_id])
            else:
                self._append(request, tokens[request_id])
        return progressed

    def _append(self, request: Request, token: int) -> None:
        """Gives the request its next token, and ends it if that is the last."""
        request.token_ids.append(token)
        if token in request.stop_ids:
            named = token in request.params.stop_token_ids
            self.finish(request, FinishReason.STOP, token if named else None)
        elif len(request.token_ids) >= request.max_total_tokens:
            self.finish(request, FinishReason.LENGTH)

    def check_invariants(self) -> None:
        """Proves that rows, tables and pool agree; for tests."""
        self.kv.check_invariants(self.requests())
        rows = [request.row for request in self.running if request.row is not None]
        assert sorted(rows + self._free_rows) == list(range(len(rows) + len(self._free_rows)))
        assert [r.arrival for r in self.running] == sorted(r.arrival for r in self.running)
        for request in self.requests():
            running = request.status is RequestStatus.RUNNING
            assert running == (request in self.running) == (request.row is not None)
            assert running or not request.block_ids
            assert len(request.block_ids) >= self.kv.blocks_for(request.num_scheduled)
