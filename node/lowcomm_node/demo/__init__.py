"""A swarm on one machine.

demo.py    starts its processes, waits for them, and ends them
result.py  what came of it
"""
