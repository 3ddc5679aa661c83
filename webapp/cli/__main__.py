"""`python -m webapp.cli`, where the command is not installed."""

import sys

from webapp.cli import main

sys.exit(main())
