"""The full-screen chat, `edgeinfer chat`."""
