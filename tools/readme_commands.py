"""Prints one of the README's marked commands, so that CI runs the very text that people copy. Usage: readme_commands.py FILE NAME.

A command is a fenced block right after the line `<!-- command: NAME -->`.
"""

import re
import sys
from pathlib import Path


def command(text: str, name: str) -> str:
    """The block marked NAME. Raises SystemExit when there is none."""
    found = re.search(rf"<!-- command: {re.escape(name)} -->\s*```(?:bash|sh)\n(.*?)```", text, re.DOTALL)
    if found is None:
        raise SystemExit(f"no command marked {name!r}")
    return found.group(1)


if __name__ == "__main__":
    print(command(Path(sys.argv[1]).read_text(encoding="utf-8"), sys.argv[2]), end="")
