"""A swarm on one machine.

demo.py    starts its processes, waits for them, and ends them
view.py    shows how they get on
result.py  what came of it
"""
