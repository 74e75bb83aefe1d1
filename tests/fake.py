"""A runner without a model: the next token is a function of the tokens before it."""

from __future__ import annotations

import dataclasses
import hashlib

from jpaged.config import ModelConfig
from jpaged.engine.engine import Engine
from jpaged.engine.runner import StepResult
from jpaged.scheduling.scheduler import ScheduledStep


def next_token(token_ids: list[int], vocab_size: int) -> int:
    """Depends on every token and its place, so a wrong, missing or doubled one changes the output."""
    digest = hashlib.blake2b(repr(token_ids).encode(), digest_size=4).digest()
    return 3 + int.from_bytes(digest, "little") % (vocab_size - 3)


@dataclasses.dataclass
class FakeHandle:
    outcome: StepResult

    def result(self) -> StepResult:
        return self.outcome

    def ready(self) -> bool:
        return True


class FakeRunner:
    """Keeps what a device would: KV by (block, offset) as the token that was written there.

    Sampling reads a row's tokens back through its block table, so a block that is shared, freed or
    overwritten wrongly shows up as a wrong token.
    """

    def __init__(self, vocab_size: int = 301, block_size: int = 16):
        self.vocab_size = vocab_size
        self.block_size = block_size
        self.slots: dict[tuple[int, int], int] = {}
        self.tables: dict[int, list[int]] = {}
        self.last: dict[int, int] = {}
        self.steps: list[ScheduledStep] = []
        self.fail_at: int | None = None
        self.scripts: dict[str, list[int]] = {}  # tokens to give, by the caller's request id
        self.resets = 0

    def run(self, step: ScheduledStep) -> FakeHandle:
        self.steps.append(step)
        if self.fail_at is not None and step.number >= self.fail_at:
            self.fail_at = None
            raise RuntimeError("the device failed")
        self._copy(step)
        for admitted in step.admitted:
            self.tables[admitted.row] = []
        tokens = {}
        for sequence in step.sequences:
            table = self.tables[sequence.row]
            del table[sequence.table_start + len(sequence.table_blocks) :]
            table[sequence.table_start :] = sequence.table_blocks or table[sequence.table_start :]
            ids = sequence.token_ids or (self.last[sequence.row],)
            assert len(ids) == sequence.num_tokens
            for position, token in enumerate(ids, start=sequence.start):
                self.slots[table[position // self.block_size], position % self.block_size] = token
        for sequence in step.sequences:
            if sequence.samples:
                token = self._sample(sequence.request_id, sequence.row, sequence.end)
                tokens[sequence.request_id] = self.last[sequence.row] = token
        return FakeHandle(StepResult(tokens, {}, {}, {}))

    def _copy(self, step: ScheduledStep) -> None:
        copied = {
            (copy.target, offset): self.slots[copy.source, offset]
            for copy in step.copies
            for offset in range(self.block_size)
            if (copy.source, offset) in self.slots
        }
        self.slots.update(copied)

    def _sample(self, request_id: str, row: int, length: int) -> int:
        context = self.read(row, length)
        script = self.scripts.get(request_id.split("/")[0])
        if script is not None:
            prompt = self.scripts[request_id.split("/")[0] + "/prompt"]
            index = length - len(prompt)
            return script[index] if index < len(script) else next_token(context, self.vocab_size)
        return next_token(context, self.vocab_size)

    def read(self, row: int, length: int) -> list[int]:
        table = self.tables[row]
        return [self.slots[table[p // self.block_size], p % self.block_size] for p in range(length)]

    def register(self, request_id: str, bad_words: list[list[int]]) -> None: ...

    def forget(self, request_id: str) -> None: ...

    def reset(self) -> None:
        self.resets += 1
        self.slots.clear()
        self.tables.clear()


def fake_engine(**options) -> Engine:
    """An engine on a fake runner, sized for tests."""
    config = ModelConfig(
        vocab_size=301,
        hidden_size=8,
        intermediate_size=8,
        num_layers=1,
        num_heads=1,
        num_kv_heads=1,
        head_dim=2,
        max_position_embeddings=4096,
        eos_token_ids=(2,),
    )
    sizes = dict(max_num_seqs=4, max_num_batched_tokens=64, num_kv_blocks=64, max_model_len=1024)
    sizes |= options
    runner = FakeRunner(config.vocab_size, sizes.get("block_size", 16))
    return Engine(config, None, runner=runner, **sizes)


def expected_output(prompt: list[int], count: int, vocab_size: int = 301) -> list[int]:
    """What the fake runner gives a prompt that runs alone."""
    ids = list(prompt)
    for _ in range(count):
        ids.append(next_token(ids, vocab_size))
    return ids[len(prompt) :]


def drain(engine: Engine, *, check: bool = True, limit: int = 10_000) -> dict:
    """Steps until idle; returns the last output of every request."""
    outputs = {}
    for _ in range(limit):
        if not engine.has_unfinished():
            return outputs
        for output in engine.step():
            outputs[output.request_id] = output
        if check:
            engine.scheduler.check_invariants()
    raise AssertionError(f"not idle after {limit} steps")
