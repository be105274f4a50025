"""Runs five real prompts with five kinds of grammar on TP2 x PP2, and checks every output with Python's own tools."""

from __future__ import annotations

import json
import re
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
LIKES = ("music", "sport", "books", "food")
PERSON: dict[str, Any] = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 24},
        "age": {"type": "integer", "minimum": 1, "maximum": 120},
        "likes": {"type": "array", "items": {"enum": LIKES}, "minItems": 1, "maxItems": 3},
    },
    "required": ["name", "age", "likes"],
    "additionalProperties": False,
}
DATE = r"(19|20)[0-9]{2}-(0[1-9]|1[0-2])-(0[1-9]|[12][0-9]|3[01])"
MOVE = 'root ::= piece [a-h] [1-8]\npiece ::= "K" | "Q" | "R" | "B" | "N"\n'
MOODS = ["positive", "negative", "neutral"]


def is_person(text: str) -> bool:
    """Returns whether ``text`` is a JSON object as PERSON wants it."""
    value = json.loads(text)
    return (
        list(value) == PERSON["required"]
        and isinstance(value["name"], str)
        and 1 <= value["age"] <= 120
        and 1 <= len(value["likes"]) <= 3
        and all(like in LIKES for like in value["likes"])
    )


def is_object(text: str) -> bool:
    """Returns whether ``text`` is a JSON object."""
    return isinstance(json.loads(text), dict)


DEMOS: list[tuple[str, dict[str, Any], Callable[[str], object]]] = [
    ("Describe a person who plays the piano, as JSON.", {"json_schema": PERSON}, is_person),
    ("When did people first walk on the moon? Answer with a date.", {"regex": DATE}, re.compile(DATE).fullmatch),
    ("Name a good chess move for a knight.", {"ebnf": MOVE}, re.compile("[KQRBN][a-h][1-8]").fullmatch),
    ("Is this review positive? 'I loved every minute of it.'", {"choice": MOODS}, MOODS.__contains__),
    ("Give the capital and the language of Italy as a small JSON object.", {"json_object": True}, is_object),
]


def main() -> int:
    """Runs the demo; returns 0 when every output is what its grammar says."""
    with tempfile.TemporaryDirectory() as folder:
        requests, results = Path(folder, "requests.jsonl"), Path(folder, "results.jsonl")
        lines = [
            {"messages": [{"role": "user", "content": prompt}], "temperature": 0, "max_tokens": 120, **grammar}
            for prompt, grammar, _ in DEMOS
        ]
        requests.write_text("\n".join(map(json.dumps, lines)))
        options = ["--tp", "2", "--pp", "2", "--input", str(requests), "--output", str(results)]
        print("lockstep generate", *options[:4], "with SmolLM2-135M-Instruct: four ranks start, this takes a moment")
        code = subprocess.run([sys.executable, "-m", "launch", "generate", *options], cwd=ROOT, check=False).returncode
        if code:
            return code
        records = [json.loads(line) for line in results.read_text().splitlines()]
    failed = 0
    for (prompt, grammar, check), record in zip(DEMOS, records, strict=True):
        try:
            good = record["finish_reason"] == "stop" and bool(check(record["text"]))
        except (ValueError, KeyError, TypeError):
            good = False
        failed += not good
        (kind,) = grammar
        print(f"\n{prompt}\n  [{kind}] {'ok' if good else 'WRONG'} ({record['finish_reason']})\n{record['text']}")
    print(f"\n{len(DEMOS) - failed} of {len(DEMOS)} outputs are what their grammars say")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
