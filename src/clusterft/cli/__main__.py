"""`python -m clusterft.cli`: the console script where it is not on the path."""

import sys

from clusterft.cli import main

sys.exit(main())
