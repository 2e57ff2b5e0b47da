"""``python -m vpipe``: the command where its script is not on the path."""

import sys

from vpipe.app.cli import main

sys.exit(main())
