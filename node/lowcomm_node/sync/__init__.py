"""Exchanges over the network: carries out what ``lowcomm_protocol.exchange.pair.machine`` decides.

exchanger.py      what is due, what runs, who is accepted
driver.py         one exchange: effects become work, results become events
pair_driver.py    ... of two                         group_driver.py   ... of a group
link.py           one stream to one member           frames.py         what members of a group tell, checked
offers.py         offers and refusals, checked       history.py        what became of exchanges
needs.py          how long an exchange takes here    own_line.py       whose fault it is when nothing comes
"""
