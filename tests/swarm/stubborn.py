"""``python -m stubborn join ...``: a node whose program does not care whether the run takes it. Others must."""

from lowcomm_node.admitting import Standing
from lowcomm_node.cli import main

Standing.check_ourselves = lambda self, now: None  # pyright: ignore[reportAttributeAccessIssue]
if __name__ == "__main__":
    main()
