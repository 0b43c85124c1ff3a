"""The command ``lowcomm-node``, also as ``python -m lowcomm_node``."""

from lowcomm_node.system.imports import importing

with importing():
    from lowcomm_node.cli import main

if __name__ == "__main__":
    main()
