"""``python -m stubborn join ...``: a node whose program does not care whether the run takes it.
Others must."""

from lowcomm_node.cli import main
from lowcomm_node.swarm.admission import RunAdmission

RunAdmission.check_ourselves = lambda self, now: None  # pyright: ignore[reportAttributeAccessIssue]
if __name__ == "__main__":
    main()
