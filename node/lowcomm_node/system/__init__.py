"""What every room may use: logs, units, formatting, and what the operating system offers."""
