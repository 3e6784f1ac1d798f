"""`python -m fr_lightning` is `fr-lightning`."""

from fr_lightning.cli import console

console()
