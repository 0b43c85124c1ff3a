"""The command ``lowcomm-node``, also as ``python -m lowcomm_node``."""

from lowcomm_node.system.command import run_command


def main() -> None:
    """Run the command line."""
    run_command("lowcomm_node.cli")


if __name__ == "__main__":
    main()
