"""Tools for every room: logs, units, tasks, and services of the operating system."""
