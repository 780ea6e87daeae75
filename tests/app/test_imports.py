"""What a start does not import."""

from __future__ import annotations

import subprocess
import sys


def test_serving_imports_neither_rich_nor_the_other_commands() -> None:
    code = (
        "import sys; import llamaslot.cli.serve_command, llamaslot.app.composition; "
        "print(*[name for name in sys.modules if name.split('.')[0] == 'rich' or name.endswith('_command')])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["llamaslot.cli.serve_command"]
