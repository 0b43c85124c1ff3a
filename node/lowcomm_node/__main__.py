"""``python -m lowcomm_node``."""

from lowcomm_node.cli import main

main()
