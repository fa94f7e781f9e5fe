"""`python -m elasticrun` is `elasticrun`."""

from __future__ import annotations

import sys

from elasticrun.cli import main

if __name__ == "__main__":
    sys.exit(main())
