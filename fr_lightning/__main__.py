"""`python -m fr_lightning` is `fr-lightning`."""

import sys

from fr_lightning.cli import main

sys.exit(main())
