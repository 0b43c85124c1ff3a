#!/bin/sh
# Tells the nodes of a compose file where the bootstrap server is, in a file that they read, and serves:
# door.sh NAME [FLAG...]. NAME is that of its service; its number is for nodes on other networks, which do not know names.
set -eu
name=$1
shift
id=$(lowcomm-bootstrap id)
number=$(hostname -i | tr ' ' '\n' | grep -m 1 -v -e : -e '^127\.')
printf '%s\n' "/dns4/$name/tcp/31337/p2p/$id" "/ip4/$number/tcp/31337/p2p/$id" > /door/addresses.new
mv /door/addresses.new /door/addresses
exec lowcomm-bootstrap serve "$@"
