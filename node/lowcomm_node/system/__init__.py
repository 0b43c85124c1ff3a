"""What everything stands on: logs, figures in words, and what the operating system offers."""
