"""From a name and wishes to an engine: the device, what it takes there, and bringing it there."""
