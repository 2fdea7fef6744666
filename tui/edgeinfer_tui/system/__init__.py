"""What commands ask of the system: sockets, processor features."""
