"""`python -m server`: the command `inferd`."""

import sys

from server.cli import main

sys.exit(main())
