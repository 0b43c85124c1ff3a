"""Machines of one owner on one network, which act as one peer.

A *lender* (`lowcomm-node lend`) computes for a *head* (`lowcomm-node join --with ADDRESS`). The
owner pairs them once by a code (`pairing`); each pins the other's certificate (`machines`). From
then on the head opens links (`link`), and the lender connects each to a worker (`lender`).
"""

PORT = 31340
"""Default port of a lender."""
