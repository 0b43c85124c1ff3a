"""Exchanges over the network: carries out what ``lowcomm_protocol.exchange.peer`` decides.

exchanger.py      drives the machine of the peer: steps, calls, timers
driver.py         one exchange: effects become work, results become events
pair_driver.py    ... of two                         group_driver.py   ... of a group
link.py           one stream to one member           frames.py         what members send, checked
history.py        what became of exchanges
"""
