"""The chat that fills the terminal: `edgeinfer chat`."""
