"""`python -m pdrt` is the `pdrt` command."""

import sys

from pdrt.cli.main import main

sys.exit(main())
