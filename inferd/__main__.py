"""`python -m inferd`: the command `inferd`."""

import sys

from inferd.server.cli import main

sys.exit(main())
