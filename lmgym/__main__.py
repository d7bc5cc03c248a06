"""`python -m lmgym` is the command `lmgym`."""

import sys

from lmgym.cli.main import main

sys.exit(main())
