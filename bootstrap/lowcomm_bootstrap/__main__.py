"""``python -m lowcomm_bootstrap``."""

from lowcomm_bootstrap.cli import main

main()
