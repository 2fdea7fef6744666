"""System interfaces of the commands: sockets, machine probes."""
