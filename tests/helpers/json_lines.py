"""Files that have a JSON record a line, such as metrics.jsonl."""

import json
from pathlib import Path
from typing import Any


def read_json_lines(path: Path) -> list[dict[str, Any]]:
    # Not by `splitlines`: a response may hold U+2028 or another end of a line that JSON does not escape.
    with path.open(encoding="utf-8") as file:
        return [json.loads(line) for line in file]
