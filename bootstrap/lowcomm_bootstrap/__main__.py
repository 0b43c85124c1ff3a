"""The command ``lowcomm-bootstrap``, also as ``python -m lowcomm_bootstrap``."""

from lowcomm_node.system.command import run_command


def main() -> None:
    """Run the command line."""
    run_command("lowcomm_bootstrap.cli")


if __name__ == "__main__":
    main()
