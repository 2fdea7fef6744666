"""One model behind OpenAI's HTTP interface, for programs on this machine."""
