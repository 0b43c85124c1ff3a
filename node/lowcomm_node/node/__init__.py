"""The daemon: wires the rooms, and leads a node through its life."""
