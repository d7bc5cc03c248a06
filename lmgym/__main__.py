"""`python -m lmgym` is the command `lmgym`."""

import sys

from lmgym.cli import main

sys.exit(main())
