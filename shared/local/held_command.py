"""`python -m shared.local.held_command PIPE up …`: the command `segue`, which ends when a pipe of its parent does.

`segue run` starts its deployment so.
"""

from __future__ import annotations

import sys

from shared.local.cli import main
from shared.process.role_main import hold_lifeline

if __name__ == "__main__":
    hold_lifeline(int(sys.argv.pop(1)))
    main()
