"""A deterministic batch job on a real tiny model, killed twenty times, ends with the same bytes per id."""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

TESTS = Path(__file__).parent
KILLS = 20

# Imports once and forks a child for each line it reads; jax starts in the children only.
SERVER = """
import os, sys
sys.path.insert(0, sys.argv[1])
import conftest
from jpaged import LLM
from jpaged.offline import run_batch
conftest.use_compilation_cache(sys.argv[3])
for _ in sys.stdin:
    pid = os.fork()
    if not pid:
        config = conftest.tiny_config()
        llm = LLM(config=config, params=conftest.tiny_params(config), deterministic=True, max_model_len=96,
                  max_num_seqs=8, max_num_batched_tokens=64, num_kv_blocks=40)
        folder = sys.argv[2] + "/"
        run_batch(llm, folder + "in.jsonl", folder + "out.jsonl", seed=3, resume=True, use_tqdm=False)
        os._exit(0)
    print(pid, flush=True)
    print(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]), flush=True)
"""


class Server:
    """Runs the job in a process that can be killed."""

    def __init__(self, folder: Path, cache: Path):
        command = [sys.executable, "-c", SERVER, str(TESTS), str(folder), str(cache)]
        env = os.environ | {"JAX_PLATFORMS": "cpu"}
        self.process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=env
        )

    def start(self) -> int:
        self.process.stdin.write("run\n")
        self.process.stdin.flush()
        return int(self.process.stdout.readline())

    def wait(self) -> int:
        return int(self.process.stdout.readline())

    def close(self) -> None:
        self.process.stdin.close()
        self.process.stdout.close()
        self.process.wait()


def write_job(path: Path) -> None:
    rng = random.Random(0)
    lines = []
    for number in range(120):
        prompt = [rng.randrange(3, 301) for _ in range(rng.randint(1, 40))]
        line = {"id": f"r{number}", "prompt_token_ids": prompt, "max_tokens": rng.randint(1, 50)}
        line |= rng.choice([{"temperature": 0}, {"temperature": 1.0}, {"temperature": 0, "logprobs": 3}])
        lines.append(json.dumps(line))
    lines.insert(50, "{torn")
    path.write_text("\n".join(lines) + "\n")


def records(path: Path) -> dict[str, bytes]:
    lines = path.read_bytes().splitlines(keepends=True)
    by_id = {json.loads(line)["id"]: line for line in lines}
    assert len(by_id) == len(lines), "an id was written twice"
    return by_id


def test_twenty_kills_change_no_byte(tmp_path, pytestconfig):
    cache = pytestconfig.rootpath / ".pytest_cache" / "jax"
    runs = {}
    for name, kills in (("whole", 0), ("killed", KILLS)):
        folder = tmp_path / name
        folder.mkdir()
        write_job(folder / "in.jsonl")
        server = Server(folder, cache)
        try:
            done = run_with_kills(server, folder / "out.jsonl", kills)
        finally:
            server.close()
        assert done == kills
        runs[name] = records(folder / "out.jsonl")
    assert len(runs["whole"]) == 121
    assert runs["killed"] == runs["whole"]


def run_with_kills(server: Server, sink: Path, kills: int) -> int:
    """Kills the job when it has written a few more bytes, `kills` times; then lets it end."""
    rng = random.Random(1)
    for done in range(kills):
        pid = server.start()
        goal = (sink.stat().st_size if sink.exists() else 0) + rng.randrange(1, 1000)
        while not (sink.exists() and sink.stat().st_size >= goal):
            time.sleep(0.001)
        os.kill(pid, signal.SIGKILL)
        if server.wait() != -signal.SIGKILL:
            return done
    server.start()
    assert server.wait() == 0
    return kills
